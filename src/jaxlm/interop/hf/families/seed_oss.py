"""Seed-OSS: Llama's blocks with biases on queries, keys and values, and dropout.

Source: ByteDance Seed 2025, "Seed-OSS Open-Source Models", and its code in transformers.
"""

from dataclasses import field

from jaxlm.core.field_types import BelowOne, NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family
from jaxlm.interop.hf.shared_keys import same_keys, usual_keys
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "seed_oss")
class SeedOssConfig(RotaryDecoderConfig, LlamaBlocks):
    """Seed-OSS. The defaults are Seed-OSS 36B with a shorter context and without dropout.

    Attributes:
        attention_bias: add biases to the query, key and value projections.
    """

    seq_len: PositiveInt = 32768
    hidden_dim: PositiveInt = 5120
    intermediate_dim: PositiveInt = 27648
    num_layers: NumLayers = 64
    num_heads: PositiveInt = 80
    num_kv_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 128
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e7))
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: BelowOne = 0.0
    residual_dropout: BelowOne = 0.0


FAMILY = Family(
    model_types=("seed_oss",),
    architecture="SeedOssForCausalLM",
    config=SeedOssConfig,
    keys=(
        *usual_keys(length=524288, head=128),
        *same_keys(attention_bias=True, attention_out_bias=False, mlp_bias=False),
        *same_keys(attention_dropout=0.1, residual_dropout=0.1),
    ),
    tensors=lambda config: tuple(llama_rows(config)),
)
