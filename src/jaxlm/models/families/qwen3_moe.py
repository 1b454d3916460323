"""Qwen3 MoE: Qwen3's attention with a mixture of experts in place of the MLP.

Source: Yang et al. 2025 (arXiv:2505.09388), section 2.
"""

from dataclasses import field

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaAttention
from jaxlm.models.decoders.moe_decoder import MixedMoeConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "qwen3_moe")
class Qwen3MoeConfig(LlamaAttention, MixedMoeConfig):
    """Qwen3 MoE. The defaults are Qwen3 30B-A3B."""

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 2048
    intermediate_dim: PositiveInt = 768
    num_layers: NumLayers = 48
    num_heads: PositiveInt = 32
    num_kv_heads: PositiveInt | None = 4
    head_dim: PositiveInt | None = 128
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))
    num_experts: PositiveInt = 128
    num_experts_per_token: PositiveInt = 8
    attention_bias: bool = False
    norm_topk_prob: bool = True
    use_qk_norm = True
