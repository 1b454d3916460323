"""The interface of presets: a section that fills in keys of other sections. Keys that you write always win.

The keys are filled in before the configuration is decoded, so checkpoints hold the numbers themselves. The same derivation,
from the complete configuration, gives the rows of the start-up table.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import draccus

from jaxlm.reading.choices import Registry
from jaxlm.reading.decode import choice_name, decode
from jaxlm.reading.yaml import ConfigSource, KeyPath, merge

_KEY = "preset"


@dataclass(frozen=True)
class DerivedNumber:
    """A number that a preset has worked out.

    Attributes:
        name: what it is.
        value: the number, or numbers by name.
        formula: how it follows from other numbers.
        source: where the formula comes from; empty if it says so itself.
        key: dotted path of the key that it fills in; None if it only leads to others.
        instead: what is used in place of it because of a key that you wrote, and that key; empty if it is used, or if `key`
            says so.
    """

    name: str
    value: Any
    formula: str
    source: str
    key: str | None = None
    instead: str = ""

    def row(self, tree: Mapping[str, Any]) -> tuple[str, str]:
        """Name and text for a table. Says so if the key has another value in the configuration `tree`."""
        text = f"{_format(self.value)}: {self.formula}" + (f" [{self.source}]" if self.source else "")
        if self.instead:
            return self.name, f"{self.instead} (the preset derives {text})"
        if self.key is None:
            return self.name, text
        path = tuple(self.key.split("."))
        if given_at(tree, path) in (None, self.value):
            return self.name, f"{text} -> {self.key}"
        return self.name, f"{_format(given_at(tree, path))}: you wrote {self.key} (the preset derives {text})"


@dataclass(frozen=True)
class RunSize:
    """Holds what a scaling law is fitted to, beside the loss.

    Attributes:
        num_parameters: the scaling parameters.
        flops_per_token: forward and backward.
    """

    num_parameters: int
    flops_per_token: int
    num_steps: int
    num_tokens: int


@dataclass(frozen=True)
class Derivation:
    """Holds what follows from a preset.

    Attributes:
        keys: the keys that it fills in, as a nested dictionary.
        numbers: in the order in which they follow from each other.
        size: None for a preset that no scaling law is fitted to.
    """

    keys: dict[str, Any]
    numbers: tuple[DerivedNumber, ...]
    size: RunSize | None = None


@dataclass(frozen=True)
class PresetConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """Fills in keys of other sections. `type:` selects the preset."""

    phase_keys: ClassVar[tuple[str, ...]] = ()
    """The keys that decide which phases there are and how long they last; empty for a preset that leaves phases alone."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        return cls.of_role("default")

    @abc.abstractmethod
    def derive(self, source: ConfigSource) -> Derivation:
        """Derives what follows from this section and from the keys of a configuration that the preset reads, such as
        `model.seq_len`. Deriving again from the complete configuration gives the same.

        Raises:
            ConfigError: nothing that can be trained follows.
        """


@dataclass(frozen=True)
class _PresetSection:
    preset: PresetConfig | None = None


def with_preset(source: ConfigSource) -> ConfigSource:
    """The configuration with the keys that its preset fills in."""
    section = source.tree.get(_KEY)
    if section is None:
        return source
    preset = decode(_PresetSection, ConfigSource({_KEY: section}, source.marks)).preset
    assert preset is not None
    keys = preset.derive(source).keys
    filled = {path: f"preset {choice_name(type(preset))}" for path in _paths(keys, ()) if not _has(source.tree, path)}
    return ConfigSource(merge(keys, source.tree), {**source.marks, **filled})


def preset_rows(preset: PresetConfig | None, tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers that a preset derives, as rows of name and text. Args: tree: the complete configuration."""
    if preset is None:
        return []
    rows = (number.row(tree) for number in preset.derive(ConfigSource(dict(tree))).numbers)
    return [(_KEY, f"{choice_name(type(preset))}, which derives:"), *((f"  {name}", text) for name, text in rows)]


def given_at(tree: Mapping[str, Any], path: Sequence[str]) -> Any:
    """The value at a path; None if there is none."""
    node: Any = tree
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _has(tree: Mapping[str, Any], path: KeyPath) -> bool:
    parent = given_at(tree, [str(key) for key in path[:-1]])
    return isinstance(parent, Mapping) and path[-1] in parent


def _paths(keys: Mapping[str, Any], at: KeyPath) -> Iterator[KeyPath]:
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from _paths(value, (*at, key))
        else:
            yield (*at, key)


def _format(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_format(item)}" for name, item in value.items())
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
