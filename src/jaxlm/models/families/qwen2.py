"""Qwen2: Llama's blocks with biases on the query, key and value projections.

Source: Yang et al. 2024 (arXiv:2407.10671), section 2.2.
"""

from dataclasses import field

import jax

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import projections
from jaxlm.models.decoders.pre_norm import LateWindowConfig
from jaxlm.models.mixers.attention import SelfAttention
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

    def attention(self, keys: jax.Array) -> SelfAttention:
        return SelfAttention(**projections(self, keys, qkv_bias=True, out_bias=False))
