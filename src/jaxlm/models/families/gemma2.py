"""Gemma 2: soft caps on scores and logits, one rotation for all layers.

Source: Gemma Team 2024 (arXiv:2408.00118), section 2.
"""

from dataclasses import dataclass, field

from jaxlm.models.base import ModelConfig
from jaxlm.models.families.gemma import GemmaConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig


@ModelConfig.register_subclass("gemma2")
@dataclass(frozen=True)
class Gemma2Config(GemmaConfig):
    """Gemma 2's sizes; the defaults are Gemma 2 2B.

    Attributes:
        rope: how queries and keys are rotated.
    """

    hidden_dim: int = 2304
    intermediate_dim: int = 9216
    num_heads: int = 8
    num_kv_heads: int | None = 4
    attn_soft_cap: float | None = 50.0
    final_soft_cap: float | None = 30.0
    rope: RotaryConfig = field(default_factory=DefaultRotary)

    @property
    def rotations(self) -> tuple[RotaryConfig, RotaryConfig]:
        """See `GemmaConfig.rotations`."""
        return self.rope, self.rope

    def head_norms(self) -> tuple[None, None]:
        """See `GemmaConfig.head_norms`."""
        return None, None
