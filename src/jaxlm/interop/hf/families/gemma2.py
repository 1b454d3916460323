"""Gemma 2: soft caps on attention scores and logits, one rotary embedding for all layers.

Source: Gemma Team 2024 (arXiv:2408.00118), section 2.
"""

from dataclasses import field

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveFloat, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.families.gemma import GEMMA_NORMS, ONLY_CAUSAL, gemma_keys
from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import RESPELLED_WINDOWS, rope
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import PatternConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "gemma2")
class Gemma2Config(PatternConfig, LlamaBlocks):
    """Gemma 2. The defaults are Gemma 2 2B.

    Attributes:
        rope: rotary position embedding of queries and keys.
    """

    seq_len: PositiveInt = 8192
    hidden_dim: PositiveInt = 2304
    intermediate_dim: PositiveInt = 9216
    num_layers: NumLayers = 26
    num_heads: PositiveInt = 8
    num_kv_heads: PositiveInt | None = 4
    head_dim: PositiveInt | None = 256
    activation_function: str = "gelu_new"
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: PositiveInt = 256
    attn_soft_cap: PositiveFloat | None = 50.0
    final_soft_cap: PositiveFloat | None = 30.0
    rope: RotaryConfig = field(default_factory=DefaultRotary)
    scales_embeddings = True
    norm_offset = 1.0
    hybrid_norm = True

    @property
    def rotations(self) -> tuple[RotaryConfig, RotaryConfig]:
        return self.rope, self.rope


FAMILY = Family(
    model_types=("gemma2",),
    architecture="Gemma2ForCausalLM",
    config=Gemma2Config,
    keys=(
        *gemma_keys(length=8192, pattern=2, final_cap=30.0),
        JsonKey("attn_logit_softcapping", "attn_soft_cap", 50.0),
        rope(),
        ONLY_CAUSAL,
        FixedKey("hidden_act", "gelu_pytorch_tanh", others=("gelu_new",)),
    ),
    tensors=lambda config: tuple(llama_rows(config, norms_first=True, **GEMMA_NORMS)),
    respelled=RESPELLED_WINDOWS,
)
