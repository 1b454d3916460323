"""Kinds of sections of a configuration, and keys that sections had in earlier versions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

import draccus

T = TypeVar("T", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def choice(section: Any, name: str) -> Callable[[T], T]:
    """Makes a class a frozen dataclass, which `type: name` selects. Args: section: the registry that it extends."""
    return lambda kind: section.register_subclass(name)(dataclass(frozen=True)(kind))


class NamedChoice(draccus.ChoiceRegistry):
    """A section whose `type:` selects a subclass. The name of a type alone selects it with its default keys."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if NamedChoice in cls.__bases__:
            cls._choice_registry = {}


@dataclass(frozen=True)
class FormerKey:
    """What a key of an earlier version is now.

    Attributes:
        default: the value that it had if it was not set.
        paths: the keys inside of the section, dotted, of which those are set that the types in it have.
        values: pairs of a value, and of the keys that are set for it instead.
    """

    default: Any
    paths: tuple[str, ...]
    values: tuple[tuple[Any, Mapping[str, Any]], ...] = field(default=())

    def keys(self, value: Any) -> Mapping[str, Any]:
        """Dotted path -> value of each key."""
        same = (keys for old, keys in self.values if is_same(old, value))
        return next(same, dict.fromkeys(self.paths, value))


def is_same(one: Any, other: Any) -> bool:
    """Whether two plain values are equal; 0 and false are not."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


FORMER_KEYS: dict[type, Mapping[str, FormerKey]] = {}
"""Class of a section -> its former keys, those that select a type first."""


def with_former_keys(keys: Mapping[str, FormerKey]) -> Callable[[T], T]:
    """Lets a section be written with the keys of an earlier version."""

    def register(kind: T) -> T:
        FORMER_KEYS[kind] = keys
        return kind

    return register
