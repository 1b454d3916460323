"""Phi-3 and Phi-4: Llama's blocks with optional partial rotary embeddings and LongRoPE.

Source: Abdin et al. 2024 (arXiv:2404.14219), section 2. Their checkpoints store queries, keys and values as one matrix.
"""

from jaxlm.core.field_types import PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.pre_norm import PlainConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "phi3")
class Phi3Config(PlainConfig):
    """Phi-3 and Phi-4. The defaults are Phi-3 mini 4k. Set `rope: {type: longrope}` for the long-context models."""

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 3072
    intermediate_dim: PositiveInt = 8192
    sliding_window: PositiveInt | None = 2047
