"""Every key of a configuration, found by walking its dataclasses: what the help text and the guide are made from."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Any

from jaxlm.config.decode import encode, is_choice


@dataclass(frozen=True)
class ConfigKey:
    """One key.

    Attributes:
        name: without the path of its section.
        type: in words.
        default: as YAML, shortened; `required`, or None for a section with keys of its own.
        meaning: its sentence in the class's docstring.
    """

    name: str
    type: str
    default: str | None
    meaning: str


@dataclass(frozen=True)
class ConfigSection:
    """Keys that stand side by side.

    Attributes:
        path: dotted; `N` stands for a place in a list, `NAME` for a name you choose.
        choice: what `type:` must say for these keys; None where there is no choice, or for what all choices share.
        is_default: whether this choice, or this section, holds without being written.
        meaning: of the section.
        keys: its own; where choices share some, only what this one adds or changes.
        names: of all its keys, the shared ones too; none for what all choices share.
    """

    path: str
    choice: str | None
    is_default: bool
    meaning: str
    keys: tuple[ConfigKey, ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Place:
    path: str
    meaning: str
    default: Any


def sections(kind: type) -> Iterator[ConfigSection]:
    """All sections of a configuration, outer ones first; one that occurs in several places, only at the first."""
    yield from _walk(kind, _Place("", "", MISSING), None, (), {kind})


def _walk(
    kind: Any, place: _Place, choice: str | None, shared: tuple[ConfigKey, ...], seen: set[Any]
) -> Iterator[ConfigSection]:
    default = place.default if type(place.default) is kind else None
    keys = tuple(_keys(kind, default))
    is_default = place.default is not None if choice is None else default is not None
    own = tuple(key for key in keys if key not in shared)
    yield ConfigSection(place.path, choice, is_default, place.meaning, own, tuple(key.name for key in keys))
    docs, hints = attribute_docs(kind), typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        for inner, suffix in _dataclasses_in(hints[item.name]):
            if inner not in seen:
                seen.add(inner)
                path = f"{place.path}.{item.name}{suffix}".lstrip(".")
                yield from _enter(inner, _Place(path, docs.get(item.name, ""), _default(item, default)), seen)


def _enter(kind: Any, place: _Place, seen: set[Any]) -> Iterator[ConfigSection]:
    if not is_choice(kind):
        yield from _walk(kind, place, None, (), seen)
        return
    shared = tuple(_keys(kind, None))
    yield ConfigSection(place.path, None, place.default is not None, place.meaning, shared)
    for choice, member in sorted(kind.get_known_choices().items()):
        yield from _walk(member, place, choice, shared, seen)


def _keys(kind: Any, instance: Any) -> Iterator[ConfigKey]:
    docs, hints = attribute_docs(kind), typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        default = _default(item, instance)
        meaning = docs.get(item.name, "")
        if default is not MISSING and dataclasses.is_dataclass(default):
            yield ConfigKey(item.name, "section", None, meaning)
        else:
            shown = "required" if default is MISSING else _short(encode(default))
            yield ConfigKey(item.name, _type_name(hints[item.name]), shown, meaning)


def _dataclasses_in(hint: Any) -> Iterator[tuple[Any, str]]:
    """Each configuration inside of a type, and what its path has behind the field's name."""
    if dataclasses.is_dataclass(hint):
        yield hint, ""
        return
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    suffix = ".N" if origin is list else ".NAME" if origin is dict else ""
    for argument in arguments:
        for inner, rest in _dataclasses_in(argument):
            yield inner, suffix + rest


def _default(item: dataclasses.Field, instance: Any) -> Any:
    if instance is not None:
        return getattr(instance, item.name)
    if item.default is not MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not MISSING else MISSING


def attribute_docs(kind: type) -> dict[str, str]:
    """Attribute -> its sentence in the `Attributes:` sections of a class and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = (inspect.cleandoc(base.__doc__ or "")).partition("Attributes:\n")[2]
        for entry in re.split(r"\n(?= {4}\w)", section):
            names, _, text = entry.strip().partition(": ")
            docs.update({name.strip(): " ".join(text.split()) for name in names.split(",") if text})
    return docs


def _type_name(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return "section"
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if origin is not None:
        return f"{origin.__name__} of {_type_name(arguments[-1])}"
    return "null" if kind is type(None) else getattr(kind, "__name__", str(kind))


def _short(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
