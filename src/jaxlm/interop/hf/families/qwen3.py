"""Qwen3, alone or in a folder of Qwen3-VL: Llama's blocks with a norm on each head's queries and keys.

Source: Yang et al. 2025 (arXiv:2505.09388), section 2.
"""

from dataclasses import field

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import RESPELLED_WINDOWS, causality, late_window, same_keys, usual_keys
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.pre_norm import LateWindowConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "qwen3")
class Qwen3Config(LateWindowConfig):
    """Qwen3. The defaults are Qwen3 0.6B."""

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 1024
    intermediate_dim: PositiveInt = 3072
    num_layers: NumLayers = 28
    num_heads: PositiveInt = 16
    num_kv_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 128
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    tie_word_embeddings: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))
    attention_bias: bool = False
    use_qk_norm = True


FAMILY = Family(
    model_types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    config=Qwen3Config,
    keys=(
        *usual_keys(length=32768, head=128),
        causality(),
        late_window(28),
        *same_keys(attention_bias=False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config, norms_first=True)),
    respelled=RESPELLED_WINDOWS,
    text=(
        TextPart(
            ("qwen3_vl",),
            ("qwen3_vl_text", None),
            kept=(r"(model\.)?visual\.",),
            defaults={"max_position_embeddings": 128000, "rope_theta": 5e5, "num_key_value_heads": 32},
        ),
    ),
)
