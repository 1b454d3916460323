"""Base config of families that rotate queries and keys alike in all layers, and have no windows."""

from dataclasses import dataclass, field
from typing import ClassVar

from jaxlm.models.decoder import DecoderConfig, check_sizes
from jaxlm.models.rope import DefaultRotary, RotaryConfig, check_rope
from jaxlm.models.stacks import LayerKind


@dataclass(frozen=True)
class RotaryDecoderConfig(DecoderConfig):
    """A family whose layers differ only in their weights.

    Attributes:
        rope: rotary position embedding of queries and keys.
    """

    rope: RotaryConfig = field(default_factory=DefaultRotary)
    interleaved: ClassVar[bool] = False
    """Whether neighboring features are rotated, instead of pairs from the two halves."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return (LayerKind(self.rope, interleaved=self.interleaved),) * self.num_layers

    def check(self) -> None:
        check_sizes(self)
        check_rope(self.rope, self.num_heads, self.HeadSize.size)
