"""Gemma 3, alone or in a multimodal folder: norms on each head's queries and keys, and a separate rotary
embedding for local layers.

Source: Gemma Team 2025 (arXiv:2503.19786), section 2, the text model.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveFloat, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.families.gemma import GEMMA_NORMS, gemma_keys
from jaxlm.interop.hf.family import Family, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import RESPELLED_WINDOWS, layer_ropes
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.interop.hf.weights import qk_norms
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import PatternConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "gemma3")
class Gemma3Config(PatternConfig, LlamaBlocks):
    """Gemma 3 (text only). The defaults are Gemma 3 1B.

    Attributes:
        rope: rotary position embedding of global layers.
        local_rope: rotary position embedding of local layers (those with a sliding window).
        use_bidirectional_attention: tokens attend to later ones too, in local layers to half of `sliding_window` on either
            side. For models that embed text, such as EmbeddingGemma; their logits do not predict the next token.
    """

    seq_len: PositiveInt = 8192
    hidden_dim: PositiveInt = 1152
    intermediate_dim: PositiveInt = 6912
    num_layers: NumLayers = 26
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt | None = 1
    head_dim: PositiveInt | None = 256
    activation_function: str = "gelu_new"
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    tie_word_embeddings: bool = True
    sliding_window: PositiveInt = 512
    sliding_window_pattern: PositiveInt | None = 6
    attention_bias: bool = False
    query_pre_attn_scalar: PositiveInt = 256
    attn_soft_cap: PositiveFloat | None = None
    final_soft_cap: PositiveFloat | None = None
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))
    local_rope: RotaryConfig = field(default_factory=DefaultRotary)
    use_bidirectional_attention: bool = False
    use_qk_norm = True
    scales_embeddings = True
    norm_offset = 1.0
    hybrid_norm = True

    @property
    def rotations(self) -> tuple[RotaryConfig, RotaryConfig]:
        return self.local_rope, self.rope


def _cap_notes(theirs: Mapping[str, Any]) -> list[str]:
    cap = theirs.get(_CAP)
    return [] if cap is None else [f"{_CAP}: {cap}: transformers does not cap the attention scores of Gemma 3"]


_CAP = "attn_logit_softcapping"

FAMILY = Family(
    model_types=("gemma3_text",),
    architecture="Gemma3ForCausalLM",
    config=Gemma3Config,
    keys=(
        *gemma_keys(length=131072, pattern=6, final_cap=None, pattern_key="sliding_window_pattern"),
        JsonKey("use_bidirectional_attention", "use_bidirectional_attention", False, to_ours=bool),
        KeyGroup((_CAP,), lambda _: {}, lambda _: {_CAP: None}, _cap_notes),
        layer_ropes(theta=1e6, local_theta=10000.0, local_key="rope_local_base_freq"),
    ),
    tensors=lambda config: (
        *llama_rows(config, norms_first=True, attn__q_norm=None, attn__k_norm=None, **GEMMA_NORMS),
        *qk_norms(),
    ),
    respelled=RESPELLED_WINDOWS,
    text=(
        TextPart(
            ("gemma3",),
            ("gemma3_text", None),
            kept=(r"(model\.)?(vision_tower|multi_modal_projector)\.",),
            defaults={
                "vocab_size": 262208,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
            },
        ),
    ),
)
