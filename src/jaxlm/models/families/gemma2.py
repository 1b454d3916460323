"""Gemma 2: soft caps on attention scores and logits, one rotary embedding for all layers.

Source: Gemma Team 2024 (arXiv:2408.00118), section 2.
"""

from dataclasses import field

from jaxlm.core.field_types import PositiveFloat, PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.gemma import GemmaConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "gemma2")
class Gemma2Config(GemmaConfig):
    """Gemma 2. The defaults are Gemma 2 2B.

    Attributes:
        rope: rotary position embedding of queries and keys.
    """

    hidden_dim: PositiveInt = 2304
    intermediate_dim: PositiveInt = 9216
    num_heads: PositiveInt = 8
    num_kv_heads: PositiveInt | None = 4
    attn_soft_cap: PositiveFloat | None = 50.0
    final_soft_cap: PositiveFloat | None = 30.0
    rope: RotaryConfig = field(default_factory=DefaultRotary)

    @property
    def rotations(self) -> tuple[RotaryConfig, RotaryConfig]:
        return self.rope, self.rope

    def head_norms(self) -> tuple[None, None]:
        return None, None
