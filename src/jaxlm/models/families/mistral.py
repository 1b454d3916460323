"""Mistral: Llama's blocks with sliding-window attention.

Source: Jiang et al. 2023 (arXiv:2310.06825), section 2.
"""

from jaxlm.core.field_types import PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.pre_norm import PlainConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "mistral")
class MistralConfig(PlainConfig):
    """Mistral. The defaults are Mistral 7B v0.1."""

    seq_len: PositiveInt = 8192
    intermediate_dim: PositiveInt = 14336
    num_kv_heads: PositiveInt | None = 8
    sliding_window: PositiveInt | None = 4096
