"""Lists every key of a configuration by walking its dataclasses, for the help text and the guide."""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Any

from jaxlm.core.field_types import bounds_of, describe_limits, hints_of
from jaxlm.core.rules import Rules, rules_of
from jaxlm.reading.choices import is_import_path
from jaxlm.reading.decode import default_of, encode, is_choice


@dataclass(frozen=True)
class ConfigKey:
    """One key.

    Attributes:
        name: the key without the path of its section.
        type: description of its type.
        default: the default as YAML, shortened; or `required`; None if the value is a section.
        meaning: its entry in the class's docstring.
    """

    name: str
    type: str
    default: str | None
    meaning: str


@dataclass(frozen=True)
class ConfigSection:
    """The keys of one section, or of one `type` of a section.

    Attributes:
        path: dotted path; `N` stands for an index of a list, `NAME` for a name that you choose.
        choice: the `type` that has these keys; None if the section has no types, or for the keys that all types share.
        is_default: whether the section has this type, or exists, if it is not set.
        meaning: description of the section.
        keys: the keys; for a type, only those that it adds to the shared keys or changes.
        names: names of all keys, including shared ones; empty for the keys that all types share.
        rules: what some keys require of others; for a type, only those that it adds.
    """

    path: str
    choice: str | None
    is_default: bool
    meaning: str
    keys: tuple[ConfigKey, ...]
    names: tuple[str, ...] = ()
    rules: Rules = ()


@dataclass(frozen=True)
class _Place:
    path: str
    meaning: str
    default: Any


def sections(kind: type) -> Iterator[ConfigSection]:
    """All sections of a configuration, outer sections first. A section that occurs in several places is listed once."""
    yield from _walk(kind, _Place("", "", MISSING), None, None, {kind})


def _walk(
    kind: Any, place: _Place, choice: str | None, shared: ConfigSection | None, seen: set[Any]
) -> Iterator[ConfigSection]:
    default = place.default if type(place.default) is kind else None
    keys = tuple(_keys(kind, default))
    is_default = place.default is not None if choice is None else default is not None
    added = tuple(key for key in keys if shared is None or key not in shared.keys)
    rules = tuple(rule for rule in rules_of(kind) if shared is None or rule not in shared.rules)
    yield ConfigSection(place.path, choice, is_default, place.meaning, added, tuple(key.name for key in keys), rules)
    docs, hints = attribute_docs(kind), hints_of(kind)
    for item in dataclasses.fields(kind):
        for inner, suffix in _dataclasses_in(hints[item.name]):
            if inner not in seen:
                seen.add(inner)
                path = f"{place.path}.{item.name}{suffix}".lstrip(".")
                yield from _enter(inner, _Place(path, docs.get(item.name, ""), _default(item, default)), seen)


def _enter(kind: Any, place: _Place, seen: set[Any]) -> Iterator[ConfigSection]:
    if not is_choice(kind):
        yield from _walk(kind, place, None, None, seen)
        return
    rules = rules_of(kind)
    shared = ConfigSection(
        place.path, None, place.default is not None, place.meaning, tuple(_keys(kind, None)), rules=rules
    )
    yield shared
    inner: list[ConfigSection] = []
    # Classes that a configuration has named by an import path are registered too, but not choices for everyone.
    registered = {name: member for name, member in kind.get_known_choices().items() if not is_import_path(name)}
    for choice, member in sorted(registered.items()):
        section, *below = _walk(member, place, choice, shared, seen)
        yield section
        inner += below  # after the last type, so that they do not stand between a type and the section's path
    yield from inner


def _keys(kind: Any, instance: Any) -> Iterator[ConfigKey]:
    docs, hints = attribute_docs(kind), hints_of(kind)
    for item in dataclasses.fields(kind):
        default = _default(item, instance)
        meaning = docs.get(item.name, "")
        if dataclasses.is_dataclass(default):
            yield ConfigKey(item.name, "section", None, meaning)
        else:
            shown = "required" if default is MISSING else _short(encode(default))
            yield ConfigKey(item.name, _type_name(hints[item.name]), shown, meaning)


def _dataclasses_in(hint: Any) -> Iterator[tuple[Any, str]]:
    """Each dataclass in a type, and the part of its path after the field's name."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint, ""
        return
    suffix = {list: ".N", dict: ".NAME"}.get(typing.get_origin(hint), "")
    for argument in typing.get_args(hint):
        for inner, rest in _dataclasses_in(argument):
            yield inner, suffix + rest


def _default(item: dataclasses.Field, instance: Any) -> Any:
    return default_of(item) if instance is None else getattr(instance, item.name)


def attribute_docs(kind: type) -> dict[str, str]:
    """Attribute -> its entry in the `Attributes:` sections of a class and its bases."""
    return {name: text for base in reversed(kind.__mro__) for name, text in _own_attribute_docs(base).items()}


@functools.cache
def _own_attribute_docs(kind: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    for entry in re.split(r"\n(?= {4}\w)", section):
        names, _, text = entry.strip().partition(": ")
        docs.update({name.strip(): " ".join(text.split()) for name in names.split(",") if text})
    return docs


def _type_name(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return "section"
    if (bounds := bounds_of(kind)) is not None:
        return f"{kind.__origin__.__name__} ({describe_limits(bounds)})"
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
