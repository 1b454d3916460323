"""Mixtral: Mistral's blocks with a mixture of experts in place of the MLP.

Source: Jiang et al. 2024 (arXiv:2401.04088), section 2.
"""

from dataclasses import field

import jax

from jaxlm.core.field_types import PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import projections
from jaxlm.models.decoders.moe_decoder import MoeConfig, check_moe, softmax_routing
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.models.routers import SoftmaxRouter
from jaxlm.reading.choices import choice


@choice(ModelConfig, "mixtral")
class MixtralConfig(MoeConfig):
    """Mixtral. The defaults are Mixtral 8x7B."""

    seq_len: PositiveInt = 8192
    intermediate_dim: PositiveInt = 14336
    num_kv_heads: PositiveInt | None = 8
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))

    def routing(self) -> SoftmaxRouter:
        return softmax_routing(self, normalised=True)

    def check(self) -> None:
        check_moe(self)

    def attention(self, keys: jax.Array) -> SelfAttention:
        return SelfAttention(**projections(self, keys, qkv_bias=False, out_bias=False))
