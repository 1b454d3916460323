"""What scripts of StackWise build before they train: a configuration whose keys are attributes, and a rack of stacks."""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jaxlm.compat.stackwise.from_stackwise import from_stackwise
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NumLayers, check_simple
from jaxlm.models.growth import Place
from jaxlm.reading.recipes import config_file
from jaxlm.reading.yaml import ConfigSource, load_yaml, merge

_SECTIONS = ("progressive", "optimizer", "qlora", "architecture", "attention_custom", "tokenizer_embedding")


class Keys:
    """The keys of a section as attributes, to read and to set."""

    def __init__(self, tree: dict[str, Any]):
        object.__setattr__(self, "_tree", tree)

    def __getattr__(self, name: str) -> Any:
        tree = object.__getattribute__(self, "_tree")
        if name in _SECTIONS:
            tree[name] = tree.get(name) or {}
            return Keys(tree[name])
        if name not in tree:
            raise AttributeError(f"'{name}' is not set in this section of the configuration")
        return tree[name]

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_tree")[name] = value


class StackWiseConfig:
    """A configuration of StackWise, whose keys may be changed before training.

    Attributes:
        model, training, data: its sections.
        name: of the file, without its suffix: what a run is called without training.run_id. None without a file.
    """

    def __init__(self, source: ConfigSource | None = None, name: str | None = None):
        tree = copy.deepcopy({} if source is None else source.tree)
        self.name = name
        for section in ("model", "training", "data"):
            tree[section] = tree.get(section) or {}
        self._source = ConfigSource(tree, {} if source is None else source.marks)
        self.model, self.training, self.data = (Keys(tree[section]) for section in ("model", "training", "data"))

    @staticmethod
    def from_yaml(path: Path | str) -> "StackWiseConfig":
        return StackWiseConfig(load_yaml(path), config_file(path).stem)

    def validate(self) -> None:
        """Prints what has no effect here. Raises `ConfigError` for what jaxlm cannot do."""
        self.translated({})

    def translated(self, sizes: Mapping[str, Any], target_stacks: int | None = None) -> ConfigSource:
        """jaxlm's keys. Prints notes.

        Args:
            sizes: keys of `model` that a builder was given.
            target_stacks: number of stacks at the end; None for that of the configuration.
        """
        tree = merge(copy.deepcopy(self._source.tree), {"model": dict(sizes)})
        if target_stacks is not None:
            growth = {"progressive": {"max_stacks": None, "target_stacks": target_stacks}}
            tree["training"] = merge(tree["training"], growth)
        resolved = from_stackwise(ConfigSource(tree, self._source.marks))
        for note in resolved.notes:
            print(f"note: {note}")
        return resolved.source


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
