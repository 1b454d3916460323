"""Kinds of sections of a configuration."""

from collections.abc import Callable
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
