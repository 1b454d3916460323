"""Converts plain values to configuration dataclasses and back, and durations such as `15m` or `1h30m`.

The registries (`type: llama` selects the class) come from Draccus. Decoding is stricter than in Draccus, which accepts null
for an int, turns a list into a string if a union lists `str` first, and reports errors with a traceback. Here every error
is one sentence with the file, the line, the dotted path, the given value and the allowed values.
"""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, TypeVar, get_args

import draccus
import yaml
from draccus.choice_types import CHOICE_TYPE_KEY, ChoiceType

from jaxlm.core.errors import ConfigError, did_you_mean, listed, shortened
from jaxlm.core.field_types import LARGEST_FLOAT, bounds_of, describe_type, hints_of, in_range
from jaxlm.core.redaction import without_secrets
from jaxlm.core.rules import as_default, broken, is_given
from jaxlm.reading.choices import (
    Registry,
    import_choice,
    is_import_path,
    names_of,
    registered_class,
    signature_problems,
)
from jaxlm.reading.outline import ROOT, meant
from jaxlm.reading.yaml import ConfigSource, KeyPath, without_quotes

T = TypeVar("T")

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_PART = re.compile(
    r"\s*(\d+(?:\.\d+)?)\s*(seconds?|secs?|s|minutes?|mins?|m|hours?|hrs?|h|days?|d)(?![a-z])", re.IGNORECASE
)
_ALLOWED = "15m, 1h30m, '5 minutes', '1:30:00', or seconds (600)"
_CLOCK = re.compile(r"(\d+):([0-5]?\d):([0-5]?\d(?:\.\d+)?)")


def parse_duration(value: object) -> timedelta:
    """Parses `15m`, `15min`, `1h30m`, `5 minutes`, `1:30:00`, or a number of seconds."""
    try:
        return _parsed(value)
    except ConfigError:
        raise
    except (OverflowError, ValueError) as error:  # infinite, NaN, or too long for a timedelta
        raise ConfigError(f"{value!r} is not a finite duration, or is too long. Allowed: {_ALLOWED}") from error


def _parsed(value: object) -> timedelta:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return timedelta(seconds=value)
    text = value.strip() if isinstance(value, str) else ""
    if clock := _CLOCK.fullmatch(text):
        return timedelta(hours=int(clock[1]), minutes=int(clock[2]), seconds=float(clock[3]))
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return timedelta(seconds=float(text))
    total, end = timedelta(0), 0
    for part in _PART.finditer(text):
        if part.start() != end:
            break
        total += timedelta(**{_UNITS[part[2][0].lower()]: float(part[1])})
        end = part.end()
    if not text or end != len(text):
        raise ConfigError(f"{value!r} is not a duration. Allowed: {_ALLOWED}")
    return total


def format_duration(value: timedelta) -> int | float | str:
    """Formats as seconds, or as days and seconds if a float is not exact. `parse_duration` restores the same value."""
    seconds = value.total_seconds()
    if timedelta(seconds=seconds) != value:
        return f"{value.days}d {value.seconds}.{value.microseconds:06}s"
    return int(seconds) if seconds == int(seconds) else seconds


# For `draccus.dump`, which knows all other types of a configuration.
draccus.encode.register(timedelta, lambda value, _=None: format_duration(value))
draccus.encode.register(Annotated, lambda value, kind: draccus.encode(value, get_args(kind)[0]))


INHERITS = {"inherits": True}
"""Metadata of a list of sections. Each takes what it does not set from the section around the list: the `type`, and keys that
are set there."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def decode(kind: type[T], source: ConfigSource) -> T:
    """Builds the dataclass that a tree describes. Raises `ConfigError` for the first error in the tree."""
    return _Decoder(source, kind).dataclass(kind, source.tree, ())


def encode(value: Any) -> Any:
    """Converts a dataclass to plain values. Classes from a registry include their `type`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        for name in (f.name for f in dataclasses.fields(value) if _inherits(f)):
            fields[name] = [_without_inherited(section, fields, name) for section in fields[name]]
        kind: Any = type(value)
        return {CHOICE_TYPE_KEY: choice_name(kind), **fields} if is_choice(kind) else fields
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return [encode(item) for item in value] if isinstance(value, (list, tuple)) else value


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings by dotted path."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flattened(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _inherits(field: dataclasses.Field) -> bool:
    return field.metadata.get("inherits", False)


def _without_inherited(section: Mapping[str, Any], outer: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An encoded section of the list `name`, without the keys that decoding takes from the section around it."""
    return {
        key: value
        for key, value in section.items()
        if (value if key == name else key not in outer or value != outer[key])
    }


def dump(value: Any) -> str:
    """Converts a dataclass to YAML that `decode` reads back to an equal dataclass, but for its secrets."""
    return yaml.safe_dump(without_secrets(encode(value)), sort_keys=False, width=100)


def is_choice(kind: Any) -> bool:
    """Tells whether a class belongs to a registry, so that `type:` picks the subclass."""
    return isinstance(kind, type) and issubclass(kind, ChoiceType)


def choice_name(kind: Any) -> str:
    """The `type` of a class.

    A class that was selected by import path keeps that path as its type: its registered name is only known after import.
    """
    return max(names_of(kind, kind), key=is_import_path)


def chosen_class(kind: Any, tree: Mapping[str, Any], default: Any = None) -> type | None:
    """The class that a section selects: by its `type`, else the class of the default, else the registry's default."""
    name = tree.get(CHOICE_TYPE_KEY)
    if name is not None and not isinstance(name, str):
        return None
    if name is None and is_choice(type(default)):
        return type(default)
    name = name or kind.default_choice_name()
    known = registered_class(kind, name)
    return import_choice(kind, name) if known is None and is_import_path(name) else known


def drop_stale_keys(kind: type, file: dict[str, Any], overrides: Mapping[str, Any]) -> list[str]:
    """Removes from `file`, in place, the keys that do not apply to a `type` set on the command line.

    Returns:
        The dotted paths of the removed keys.
    """
    dropped: list[str] = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        section, over = file.get(field.name), overrides.get(field.name)
        if not isinstance(section, dict) or not isinstance(over, Mapping):
            continue
        # the registry in a union such as `TrackerConfig | list[TrackerConfig]`
        base: Any = next(filter(is_choice, typing.get_args(hints[field.name])), hints[field.name])
        if is_choice(base):
            old = chosen_class(base, section, default_of(field))
            new = chosen_class(base, over) if CHOICE_TYPE_KEY in over else old
            # Without a `type`, a section that a preset fills in has the preset's.
            is_open = CHOICE_TYPE_KEY in over and CHOICE_TYPE_KEY not in section and file.get("preset") is not None
            if new is not None and (new is not old or is_open):
                valid = {CHOICE_TYPE_KEY, *(f.name for f in dataclasses.fields(new))}
                for key in [key for key in section if key not in valid]:
                    del section[key]
                    dropped.append(f"{field.name}.{key}")
            base = new
        if dataclasses.is_dataclass(base):
            subsection: Any = base
            dropped += [f"{field.name}.{path}" for path in drop_stale_keys(subsection, section, over)]
    return dropped


def default_of(field: dataclasses.Field) -> Any:
    """The default value of a field; `dataclasses.MISSING` if it is required."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


class _MismatchError(Exception):
    """A value does not fit a type. Another member of a union may still accept it."""


class _Decoder:
    def __init__(self, source: ConfigSource, kind: type):
        self._source = source
        self._is_run = ROOT in (base.__name__ for base in kind.__mro__)

    def dataclass(
        self, kind: Any, tree: Any, path: KeyPath, default: Any = None, inherited: Mapping[str, Any] | None = None
    ) -> Any:
        """Decodes a section. A key that it does not set has its value in `inherited`, if there is one."""
        if _is_name(kind, tree):
            tree = {CHOICE_TYPE_KEY: tree}
        if not isinstance(tree, Mapping):
            keys = ["type", "..."] if is_choice(kind) else [f.name for f in dataclasses.fields(kind)]
            hint = f". Write {{type: {tree}}}" if is_choice(kind) and registered_class(kind, str(tree)) else ""
            raise self._error(
                path, f"{_format_value(tree)} given, a section with keys expected ({', '.join(keys)}){hint}"
            )
        if is_choice(kind):
            kind = self._choice(kind, tree, path, default)
            tree = {key: value for key, value in tree.items() if key != CHOICE_TYPE_KEY}
        fields = {field.name: field for field in dataclasses.fields(kind)}
        hints = hints_of(kind)
        for key in tree:
            if key not in fields:
                choice = choice_name(kind) if is_choice(kind) else None
                known = [*fields, *([] if choice is None else [CHOICE_TYPE_KEY])]
                others = {} if choice is None else kind.get_known_choices()
                types = [name for name, other in others.items() if key in [f.name for f in dataclasses.fields(other)]]
                raise unknown_key(self._source, (*path, key), choice, known, is_run=self._is_run, types=types)
        lists = {key: value for key, value in tree.items() if _inherits(fields[key])}
        values = {key: value for key, value in (inherited or {}).items() if key in fields}
        values |= {
            key: self.value(hints[key], value, (*path, key), default_of(fields[key]))
            for key, value in tree.items()
            if key not in lists
        }
        for name, field in fields.items():
            if name not in values and default_of(field) is dataclasses.MISSING:
                raise self._error(path, f"the key '{name}' is missing. It has no default; set it")
        section = self._construct(kind, values, path)
        inner = {
            key: self._inheriting(hints[key], value, (*path, key), section, values) for key, value in lists.items()
        }
        section = self._construct(kind, values | inner, path) if inner else section
        for key, problem in broken(section):
            names = key.split(".")
            is_own = _is_written(names, tree) or is_given(section, key)
            raise self._error((*path, *names), problem if is_own else as_default(problem))
        return section

    def _construct(self, kind: Any, values: Mapping[str, Any], path: KeyPath) -> Any:
        if inspect.isabstract(kind):
            missing = ", ".join(sorted(kind.__abstractmethods__))
            raise self._error(path, f"the class {kind.__qualname__} does not define {missing}. Add what is missing")
        if problem := next(signature_problems(kind), None):
            raise self._error(path, problem)
        try:
            return kind(**values)
        except ValueError as error:
            raise self._error(*_located(str(error), kind, path, values)) from error

    def _inheriting(self, kind: Any, sections: Any, path: KeyPath, outer: Any, values: Mapping[str, Any]) -> Any:
        if not isinstance(sections, list):
            return self.value(kind, sections, path)
        (section_kind,) = typing.get_args(kind)
        return [self.dataclass(section_kind, item, (*path, i), outer, values) for i, item in enumerate(sections)]

    def value(self, kind: Any, value: Any, path: KeyPath, default: Any = None) -> Any:
        for lenient in (False, True):
            try:
                return self._fit(kind, value, path, default, lenient)
            except _MismatchError:
                continue
        raise self._error(
            path, f"{_format_value(value)} given, {describe_type(kind, value)} expected{self._hint(kind, value, path)}"
        )

    def _hint(self, kind: Any, value: Any, path: KeyPath) -> str:
        """Says what to change in a value that does not fit a type, if the types alone do not say it."""
        if value == "":
            return ""  # without quotes, nothing of it is left to write
        if not _is_representable(value) and not isinstance(value, float):
            if isinstance(value, str):
                return " without control characters"
            return "" if "at most" in describe_type(kind, value) else " of at most 64 bits"
        if isinstance(value, str) and self._fits(kind, without_quotes(value), path):
            return f". Write {value} without quotes"
        is_scalar = isinstance(value, (str, int, float))
        return f". Write [{value}] for a list of one" if is_scalar and self._fits(kind, [value], path) else ""

    def _fits(self, kind: Any, value: Any, path: KeyPath) -> bool:
        try:
            self._fit(kind, value, path, None, lenient=True)
        except (_MismatchError, ConfigError):
            return False
        return True

    def _fit(self, kind: Any, value: Any, path: KeyPath, default: Any, lenient: bool) -> Any:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if kind is Any:
            return value
        if origin in (typing.Union, types.UnionType):
            return self._fit_union(arguments, value, path, default, lenient)
        if (bounds := bounds_of(kind)) is not None:
            number = _fit_simple(arguments[0], value, lenient)
            return _accept(in_range(number, bounds), number)
        if origin is typing.Literal:
            return _accept(any(value == one and type(value) is type(one) for one in arguments), value)
        if origin is list:
            _accept(isinstance(value, list), value)
            return [self.value(arguments[0], item, (*path, i)) for i, item in enumerate(value)]
        if origin is dict:
            _accept(isinstance(value, Mapping), value)
            return {str(key): self.value(arguments[1], item, (*path, key)) for key, item in value.items()}
        if is_choice(kind) or dataclasses.is_dataclass(kind):
            return self.dataclass(kind, value, path, default)
        if kind is timedelta:
            return self._duration(value, path)
        return _fit_simple(kind, value, lenient)

    def _fit_union(self, kinds: tuple[Any, ...], value: Any, path: KeyPath, default: Any, lenient: bool) -> Any:
        for kind in kinds:
            is_section = is_choice(kind) or dataclasses.is_dataclass(kind)
            if is_section and not isinstance(value, Mapping) and not _is_name(kind, value):
                continue
            try:
                return self._fit(kind, value, path, default, lenient)
            except _MismatchError:
                continue
        raise _MismatchError

    def _duration(self, value: Any, path: KeyPath) -> timedelta:
        if value is None:
            raise _MismatchError
        try:
            return parse_duration(value)
        except ConfigError as error:
            raise self._error(path, str(error)) from error

    def _choice(self, kind: Any, tree: Mapping[str, Any], path: KeyPath, default: Any) -> type:
        try:
            chosen = chosen_class(kind, tree, default)
        except ConfigError as error:
            raise self._error((*path, CHOICE_TYPE_KEY), str(error)) from error
        if chosen is None:
            known = sorted(kind.get_known_choices())
            name = tree.get(CHOICE_TYPE_KEY)
            hint = f".{near}" if (near := did_you_mean(str(name), known)) else ""
            problem = "no type given" if name is None else f"{_format_value(name)} given"
            raise self._error((*path, CHOICE_TYPE_KEY), f"{problem}. Allowed: {', '.join(known) or 'none'}{hint}")
        return chosen

    def _error(self, path: KeyPath, problem: str) -> ConfigError:
        return config_error(self._source, path, problem)


def config_error(source: ConfigSource, path: KeyPath, problem: str) -> ConfigError:
    """Makes the error for a problem at a path, with file, line and dotted path."""
    where, dotted = source.where(path), ".".join(map(str, path)) or "configuration"
    is_option = where.endswith((f"--{dotted}", f"keys: {dotted}"))  # the key is named already
    return ConfigError(": ".join([*filter(None, [where]), *([] if is_option else [shortened(dotted)]), problem]))


def unknown_key(
    source: ConfigSource,
    path: KeyPath,
    choice: str | None,
    allowed: Sequence[str],
    *,
    is_run: bool,
    types: Sequence[str] = (),
) -> ConfigError:
    """Makes the error for a key that its section does not have.

    Args:
        choice: the section's `type`, if it has one.
        types: those of its types that have the key.
    """
    near = None if types else meant(path, allowed, is_run=is_run)
    hint = f" Did you mean '{near}'?" if near else f" Types that have it: {listed(types)}." if types else ""
    section = ".".join(map(str, path[:-1])) or "the top level"
    typed = "" if choice is None else f" (type {choice})"
    return config_error(source, path, f"no such key in {section}{typed}.{hint} Allowed: {', '.join(allowed)}")


def _is_written(names: Sequence[str], tree: Any) -> bool:
    """Tells whether a key of a section, or of one inside, is written."""
    return not names or not isinstance(tree, Mapping) or (names[0] in tree and _is_written(names[1:], tree[names[0]]))


def _located(problem: str, kind: Any, path: KeyPath, values: Mapping[str, Any]) -> tuple[KeyPath, str]:
    """The path that the message of a section's own check begins with, and the rest of the message.

    The message names a key as in "end_after: ..." or "trainer.watchdog.end_after: ...". In a phase, the path is longer. Where
    it says that a value is given, the rest says that it is the default if the key is not in `values`.
    """
    name, separator, rest = problem.partition(": ")
    *parents, key = name.split(".")
    if not separator or not set(parents) <= set(path):
        return path, problem
    if key in (field.name for field in dataclasses.fields(kind)):
        return (*path, key), rest if key in values else as_default(rest)
    return (path, rest) if key in path else (path, problem)


def _is_name(kind: Any, value: Any) -> bool:
    """Tells whether a value is the name of a type that stands for a section of that type."""
    return isinstance(value, str) and isinstance(kind, type) and issubclass(kind, Registry) and kind.by_name


def _accept(condition: bool, value: Any) -> Any:
    if not condition:
        raise _MismatchError
    return value


def _fit_simple(kind: Any, value: Any, lenient: bool) -> Any:
    """Decodes bool, int, float, str or None. The only conversions are 512.0 to an int and 1 to a float."""
    if kind is type(None):
        return _accept(value is None, value)
    if lenient and kind is int and isinstance(value, float) and value.is_integer():  # not for inf and nan
        value = int(value)
    if lenient and kind is float and type(value) is int and abs(value) <= LARGEST_FLOAT:
        value = float(value)
    return _accept(type(value) is kind and _is_representable(value), value)


def _is_representable(value: Any) -> bool:
    """Tells whether a program or a file system can take a value."""
    if isinstance(value, str):
        return not _UNPRINTABLE.search(value)
    if isinstance(value, float):
        return abs(value) <= LARGEST_FLOAT  # false for nan
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _format_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
