"""What wings and installed plugins add to commands."""

import abc
from dataclasses import dataclass
from typing import Any

import draccus

from jaxlm.reading.choices import Registry, load_installed_plugins


@dataclass(frozen=True)
class CommandPart(Registry, draccus.ChoiceRegistry, abc.ABC):
    """Options of a command that only one capability needs, and what the command does when they are given.

    It is registered as `COMMAND NAME`.
    """

    @abc.abstractmethod
    def add_options(self, parser: Any) -> None:
        """Adds its options to the command's parser, or its parser to the subparsers of `convert`."""

    @abc.abstractmethod
    def run(self, options: Any, rest: Any) -> int | None:
        """Does what its options ask for, if any is given.

        Args:
            options: the command's, parsed.
            rest: the arguments or keys of a configuration that the command also takes.

        Returns:
            The exit code; None if the command is to go on.
        """


def parts_of(command: str) -> list[CommandPart]:
    """Lists what wings and installed plugins add to a command. Raises `ConfigError` for a plugin that cannot be loaded."""
    load_installed_plugins()
    names = (name for name in CommandPart.known_names() if name.partition(" ")[0] == command)
    return [CommandPart.get_choice_class(name)() for name in names]


def run_parts(parts: list[CommandPart], options: Any, rest: Any) -> int | None:
    """Runs them until one answers in place of the command. Returns its exit code; None if none does."""
    codes = (part.run(options, rest) for part in parts)
    return next((code for code in codes if code is not None), None)
