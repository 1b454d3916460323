"""The stacks of a rack, as StackWise's scripts add them. They have no weights before they train."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxlm.core.errors import ConfigError
from jaxlm.interop.stackwise.config import StackWiseConfig
from jaxlm.models.growth import Place

Trunk = Literal["frozen", "lora"]
STORED = {"full": None, "half": "float16", "bfloat16": "bfloat16", "nvfp4": "nvfp4", "qlora": "nf4"}
"""Precision of a stack -> how its weights are stored once it is part of the trunk. A stack trains in float32."""


@dataclass(frozen=True)
class Stack:
    """A stack that is to train.

    Attributes:
        number: in the order of training, from 0.
        n_blocks: its layers; None for those of the configuration.
        precision: how it is stored in the trunk; None for the configuration's.
        trunk: what the stacks before it do while it trains; None for the configuration's.
    """

    number: int
    place: Place
    n_blocks: int | None = None
    precision: str | None = None
    trunk: Trunk | None = None


class ProgressiveRackBuilder:
    """Records the stacks of a rack."""

    def __init__(
        self,
        config: StackWiseConfig | None = None,
        building_mode: str | None = None,
        default_precision: str = "full",
        **sizes: int,
    ):
        """Args: sizes: keys of the section `model` (d_model, n_heads, ...), over those of the trainer's configuration."""
        given = getattr(config.training.progressive, "building_mode", "append") if config is not None else "append"
        self.building_mode: Place = _checked(building_mode or given, "building_mode", ("append", "prepend"))
        self.default_precision, self.sizes = _checked(default_precision, "default_precision", STORED), sizes
        self.stacks: list[Stack] = []

    def append_stack(self, n_blocks: int | None = None, precision: str | None = None) -> Stack:
        """Adds a stack on the side of the output."""
        return self._add("append", n_blocks, precision)

    def prepend_stack(self, n_blocks: int | None = None, precision: str | None = None) -> Stack:
        """Adds a stack on the side of the input."""
        return self._add("prepend", n_blocks, precision)

    def freeze_trunk(self, trunk_indices: Sequence[int]) -> None:
        """While the newest stack trains, all others are frozen. Args: trunk_indices: the numbers of all others."""
        self._set_trunk("frozen", trunk_indices)

    def freeze_all_but_qlora(self, trunk_indices: Sequence[int]) -> None:
        """While the newest stack trains, only the adapters of all others do. Args: as of `freeze_trunk`."""
        self._set_trunk("lora", trunk_indices)

    def build_rack(self) -> tuple[Stack, ...]:
        """The stacks so far. Their weights are in the checkpoint of the trained run."""
        return tuple(self.stacks)

    def _add(self, place: Place, n_blocks: int | None, precision: str | None) -> Stack:
        checked = _checked(precision or self.default_precision, "precision", STORED)
        self.stacks.append(Stack(len(self.stacks), place, n_blocks, checked))
        return self.stacks[-1]

    def _set_trunk(self, trunk: Trunk, indices: Sequence[int]) -> None:
        trunk_numbers = list(range(len(self.stacks) - 1))
        if sorted(indices) != trunk_numbers or not trunk_numbers:
            raise ConfigError(
                f"trunk_indices: {list(indices)} given, {trunk_numbers} expected: all stacks before the newest one"
            )
        self.stacks[-1] = replace(self.stacks[-1], trunk=trunk)


def _checked(value: Any, name: str, allowed: Collection[str]) -> Any:
    if value not in allowed:
        raise ConfigError(f"{name}: {value!r} given. Allowed: {', '.join(allowed)}")
    return value
