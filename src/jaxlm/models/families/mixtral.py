"""Mixtral: Mistral's blocks with a mixture of experts in place of the MLP.

Source: Jiang et al. 2024 (arXiv:2401.04088), section 2.
"""

from dataclasses import field

from jaxlm.core.field_types import PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaAttention
from jaxlm.models.decoders.moe_decoder import UniformMoeConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "mixtral")
class MixtralConfig(LlamaAttention, UniformMoeConfig):
    """Mixtral. The defaults are Mixtral 8x7B."""

    seq_len: PositiveInt = 8192
    intermediate_dim: PositiveInt = 14336
    num_kv_heads: PositiveInt | None = 8
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))
