"""Configuration files of other programs, and keys of theirs beside ours: translated when a file is read."""

import abc
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import draccus

from jaxlm.reading.choices import Registry
from jaxlm.reading.targets import Resolved, Selection
from jaxlm.reading.yaml import ConfigSource


@dataclass(frozen=True)
class ForeignConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """The configuration files of another program. Its module imports no jax: files are recognized before jax is needed."""

    meaning: ClassVar[str]
    """What such a file is, for messages and help."""

    @abc.abstractmethod
    def recognizes(self, tree: Mapping[str, Any], own: Collection[str]) -> bool:
        """Tells whether a file is one of that program. Args: own: the keys of jaxlm's configurations."""

    def check(self, source: ConfigSource) -> None:
        """Raises `ConfigError` for a part of such a file that does not say that it is one."""

    @abc.abstractmethod
    def translate(self, source: ConfigSource, selection: Selection) -> Resolved:
        """Translates a file. Raises `ConfigError` if it is not valid, or asks for what jaxlm cannot do."""


@dataclass(frozen=True)
class ForeignKeys(Registry, draccus.ChoiceRegistry, abc.ABC):
    """Keys of another program that a configuration of jaxlm may have."""

    @abc.abstractmethod
    def translate(self, source: ConfigSource) -> tuple[ConfigSource, list[str]]:
        """Translates its keys, and returns a note for each. Errors as of `ForeignConfig.translate`."""


def foreign_config(source: ConfigSource, own: Collection[str]) -> ForeignConfig | None:
    """The program whose file this is; None for a configuration of jaxlm. Args: own: as of `ForeignConfig.recognizes`.

    Raises:
        ConfigError: it is a part of another program's file.
    """
    for _, kind in sorted(ForeignConfig.get_known_choices().items()):
        program = kind()
        if program.recognizes(source.tree, own):
            return program
        program.check(source)
    return None


def with_our_keys(source: ConfigSource) -> tuple[ConfigSource, list[str]]:
    """A configuration without keys of other programs, and a note for each that was translated."""
    notes = []
    for _, kind in sorted(ForeignKeys.get_known_choices().items()):
        source, of_program = kind().translate(source)
        notes += of_program
    return source, notes
