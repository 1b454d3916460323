"""GLM-4 of 2024: Llama's blocks with rotations of neighboring features, in half of each head. Gate and up are one matrix.

Source: GLM Team 2024 (arXiv:2406.12793), section 2.
"""

from dataclasses import field

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import rope, same_keys, usual_keys
from jaxlm.interop.hf.weights import fused_gated_mlp
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "glm")
class GlmConfig(RotaryDecoderConfig, LlamaBlocks):
    """GLM. The defaults are GLM-4 9B chat with a shorter context.

    Attributes:
        attention_bias: add biases to the query, key and value projections.
    """

    seq_len: PositiveInt = 16384
    intermediate_dim: PositiveInt = 13696
    num_layers: NumLayers = 40
    num_kv_heads: PositiveInt | None = 2
    head_dim: PositiveInt | None = 128
    layer_norm_epsilon: NonNegativeFloat = 1.5625e-07
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(partial_rotary_factor=0.5))
    attention_bias: bool = True
    attention_out_bias = False
    interleaved = True


FAMILY = Family(
    model_types=("glm",),
    architecture="GlmForCausalLM",
    config=GlmConfig,
    keys=(
        *usual_keys(length=131072, eps_default=1.5625e-07, head=128, rotary=rope(partial=0.5, rotates_part=True)),
        *same_keys(attention_bias=True),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (*llama_rows(config, mlp=None), *fused_gated_mlp()),
)
