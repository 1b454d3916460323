"""Qwen2 and Qwen2.5, alone or in a folder of Qwen2-VL or Qwen2.5-VL: Llama's blocks with biases on the query, key and value
projections.

Source: Yang et al. 2024 (arXiv:2407.10671), section 2.2.
"""

from dataclasses import field

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import RESPELLED_WINDOWS, causality, late_window, usual_keys
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.pre_norm import LateWindowConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "qwen2")
class Qwen2Config(LateWindowConfig):
    """Qwen2 and Qwen2.5. The defaults are Qwen2.5 0.5B."""

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 896
    intermediate_dim: PositiveInt = 4864
    num_layers: NumLayers = 24
    num_heads: PositiveInt = 14
    num_kv_heads: PositiveInt | None = 2
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    tie_word_embeddings: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))
    attention_bias = True
    attention_out_bias = False


FAMILY = Family(
    model_types=("qwen2",),
    architecture="Qwen2ForCausalLM",
    config=Qwen2Config,
    keys=(
        *usual_keys(length=32768),
        causality(),
        late_window(28),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config, norms_first=True)),
    respelled=RESPELLED_WINDOWS,
    text=(
        TextPart(
            ("qwen2_vl", "qwen2_5_vl"),
            ("qwen2_vl_text", "qwen2_5_vl_text", None),
            kept=(r"(model\.)?visual\.",),
            defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80, "num_key_value_heads": 8},
        ),
    ),
)
