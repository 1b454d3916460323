"""The stacks of a rack, as StackWise's scripts add them. They have no weights before they train."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NumLayers, check_simple
from jaxlm.interop.stackwise.config import StackWiseConfig
from jaxlm.models.growth import Place

Trunk = Literal["frozen", "lora"]
STORED_AS = {"full": None, "half": "float16", "bfloat16": "bfloat16", "nvfp4": "nvfp4", "qlora": "nf4"}
"""Precision of a stack -> how its weights are stored once it is part of the trunk. A stack trains in float32."""


@dataclass(frozen=True)
class PlannedStack:
    """A stack that is to train.

    Attributes:
        number: in the order of training, from 0.
        n_blocks: its layers; None for those of the configuration.
        precision: how it is stored in the trunk, a key of `STORED_AS`; None for the configuration's.
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
        default_precision: str | None = None,
        **sizes: int,
    ):
        """Args:
        default_precision: of stacks that are added without one, a key of `STORED_AS`; None for the configuration's.
        sizes: keys of the section `model` (d_model, n_heads, ...), over those of the trainer's configuration.
        """
        given = getattr(config.training.progressive, "building_mode", "append") if config is not None else "append"
        self.building_mode: Place = _checked(building_mode or given, "building_mode", ("append", "prepend"))
        self.default_precision = _precision(default_precision, "default_precision")
        self.sizes = sizes
        self.stacks: list[PlannedStack] = []

    def append_stack(self, n_blocks: int | None = None, precision: str | None = None) -> PlannedStack:
        """Adds a stack on the side of the output."""
        return self._add("append", n_blocks, precision)

    def prepend_stack(self, n_blocks: int | None = None, precision: str | None = None) -> PlannedStack:
        """Adds a stack on the side of the input."""
        return self._add("prepend", n_blocks, precision)

    def freeze_trunk(self, trunk_indices: Sequence[int]) -> None:
        """While the newest stack trains, all others are frozen. Args: trunk_indices: the numbers of all others."""
        self._set_trunk("frozen", trunk_indices)

    def freeze_all_but_qlora(self, trunk_indices: Sequence[int]) -> None:
        """While the newest stack trains, only the adapters of all others do. Args: as of `freeze_trunk`."""
        self._set_trunk("lora", trunk_indices)

    def build_rack(self) -> tuple[PlannedStack, ...]:
        """The stacks so far. Their weights are in the checkpoint of the trained run."""
        return tuple(self.stacks)

    def completed(self, num_stacks: int) -> tuple[PlannedStack, ...]:
        """The stacks so far, and those that are missing, on the side of `building_mode`."""
        missing = range(len(self.stacks), num_stacks)
        new = (PlannedStack(number, self.building_mode, precision=self.default_precision) for number in missing)
        return (*self.stacks, *new)

    def _add(self, place: Place, n_blocks: int | None, precision: str | None) -> PlannedStack:
        if n_blocks is not None:
            check_simple(NumLayers, n_blocks, f"stack {len(self.stacks)}: n_blocks")
        checked = _precision(self.default_precision if precision is None else precision, "precision")
        self.stacks.append(PlannedStack(len(self.stacks), place, n_blocks, checked))
        return self.stacks[-1]

    def _set_trunk(self, trunk: Trunk, indices: Sequence[int]) -> None:
        trunk_numbers = list(range(len(self.stacks) - 1))
        if sorted(indices) != trunk_numbers or not trunk_numbers:
            raise ConfigError(
                f"trunk_indices: {list(indices)} given, {trunk_numbers} expected: all stacks before the newest one"
            )
        self.stacks[-1] = replace(self.stacks[-1], trunk=trunk)


def _precision(value: str | None, name: str) -> str | None:
    return None if value is None else _checked(value, name, STORED_AS)


def _checked(value: Any, name: str, allowed: Collection[str]) -> Any:
    if value not in list(allowed):  # a list in a mapping's keys would be a TypeError
        raise ConfigError(f"{name}: {value!r} given. Allowed: {', '.join(allowed)}")
    return value
