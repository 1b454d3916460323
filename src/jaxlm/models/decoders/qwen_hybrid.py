"""Base configs of Qwen's hybrid families, with an MLP or with experts in each layer.

Source: Qwen team 2025, "Qwen3-Next" and "Qwen3.5"; gates after attention: Qiu et al. 2025 (arXiv:2505.06708).
"""

import abc
from dataclasses import dataclass, field

import jax

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.models.decoder import projections
from jaxlm.models.decoders.hybrid import HybridConfig, gated_delta_net
from jaxlm.models.decoders.moe_decoder import MoeBlock, RoutedConfig, experts, shared_expert
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.mixers.base import Mixer
from jaxlm.models.norms import RMSNorm
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.models.stacks import Block


class QwenHybridConfig(HybridConfig):
    """What Qwen's hybrid families share: norms that start as 1 + 0, gates after attention, and recurrent layers."""

    norm_offset = 1.0

    @abc.abstractmethod
    def layer(self, mixer: Mixer, *, key: jax.Array) -> Block:
        """Initializes a layer with this mixer."""

    def attention(self, keys: jax.Array) -> SelfAttention:
        """Initializes the attention of one layer, with norms over each head and a gate for each feature. Takes five keys."""
        q_norm, k_norm = (
            RMSNorm.init(self.HeadSize, self.layer_norm_epsilon, offset=self.norm_offset) for _ in range(2)
        )
        gate = Linear.init(self.Embed, (self.Heads, self.HeadSize), std=self.initializer_range, key=keys[4])
        maps = projections(self, keys[:4], qkv_bias=False, out_bias=False)
        return SelfAttention(**maps, q_norm=q_norm, k_norm=k_norm, gate_proj=gate)

    def block(self, *, key: jax.Array) -> Block:
        keys = jax.random.split(key, 6)
        return self.layer(self.attention(keys[:5]), key=keys[5])

    def recurrent_block(self, *, key: jax.Array) -> Block:
        keys = jax.random.split(key, 2)
        return self.layer(gated_delta_net(self, keys[0], norm_eps=self.layer_norm_epsilon), key=keys[1])


@dataclass(frozen=True)
class QwenHybridMoeConfig(RoutedConfig, QwenHybridConfig):
    """Qwen's hybrid families with experts. The defaults are Qwen3.5 35B-A3B.

    Attributes:
        mtp: one more layer predicts the token after the next one, as `objective.mtp_weight` trains it. False leaves such a
            layer of a folder as it is.
    """

    seq_len: PositiveInt = 32768
    hidden_dim: PositiveInt = 2048
    intermediate_dim: PositiveInt = 512
    num_layers: NumLayers = 40
    num_heads: PositiveInt = 16
    num_kv_heads: PositiveInt | None = 2
    head_dim: PositiveInt | None = 256
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e7, partial_rotary_factor=0.25))
    num_value_heads: PositiveInt = 32
    num_experts: PositiveInt = 256
    num_experts_per_token: PositiveInt = 8
    shared_expert_intermediate_dim: PositiveInt = 512
    mtp: bool = False

    def layer(self, mixer: Mixer, *, key: jax.Array) -> MoeBlock:
        keys = jax.random.split(key, 5)
        shared = shared_expert(self, keys[4], gate=True)
        return MoeBlock(self.norm(), mixer, self.norm(), experts(self, keys[:4]), shared)
