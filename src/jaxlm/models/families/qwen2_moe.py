"""Qwen2 MoE: Qwen2's attention with a mixture of experts in place of the MLP, and an expert that all tokens share.

Source: Yang et al. 2024 (arXiv:2407.10671), section 2.2.2.
"""

from dataclasses import field
from typing import ClassVar

import jax

from jaxlm.core.field_types import NonNegativeFloat, NonNegativeInt, NumLayers, PositiveInt
from jaxlm.core.rules import Rules, needs
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import projections
from jaxlm.models.decoders.moe_decoder import MixedMoeConfig
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "qwen2_moe")
class Qwen2MoeConfig(MixedMoeConfig):
    """Qwen1.5 MoE and Qwen2 MoE. The defaults are Qwen1.5 MoE A2.7B.

    Attributes:
        local_layers: numbers of the layers that `sliding_window` applies to, counted from 0. Null means all layers.
        qkv_bias: add biases to the query, key and value projections.
    """

    seq_len: PositiveInt = 8192
    hidden_dim: PositiveInt = 2048
    intermediate_dim: PositiveInt = 1408
    num_layers: NumLayers = 24
    num_heads: PositiveInt = 16
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))
    num_experts: PositiveInt = 60
    num_experts_per_token: PositiveInt = 4
    local_layers: list[NonNegativeInt] | None = None
    key_rules: ClassVar[Rules] = (needs("sliding_window", when="local_layers"),)
    shared_expert_intermediate_dim: PositiveInt = 5632
    norm_topk_prob: bool = False
    qkv_bias: bool = True

    def attention(self, keys: jax.Array) -> SelfAttention:
        return SelfAttention(**projections(self, keys, qkv_bias=self.qkv_bias, out_bias=False))
