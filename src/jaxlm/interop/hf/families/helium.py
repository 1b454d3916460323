"""Helium: Llama's blocks with rotations of neighboring features.

Source: Kyutai 2025, "Helium 1", and its code in transformers.
"""

from dataclasses import field

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import rope, same_keys, usual_keys
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "helium")
class HeliumConfig(RotaryDecoderConfig, LlamaBlocks):
    """Helium. The defaults are Helium 1 preview 2B.

    Attributes:
        attention_bias: add biases to the query, key and value projections.
    """

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 2560
    intermediate_dim: PositiveInt = 7040
    num_layers: NumLayers = 24
    num_heads: PositiveInt = 20
    layer_norm_epsilon: NonNegativeFloat = 1e-8
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=100000.0))
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_out_bias = False
    interleaved = True


FAMILY = Family(
    model_types=("helium",),
    architecture="HeliumForCausalLM",
    config=HeliumConfig,
    keys=(
        *usual_keys(length=4096, eps_default=1e-8, head=128, rotary=rope(100000.0)),
        *same_keys(attention_bias=False, mlp_bias=False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config)),
)
