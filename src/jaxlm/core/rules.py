"""Rules between the keys of one section, declared beside its fields:

    key_rules: ClassVar[Rules] = (
        only("calibration_batches", when="init", is_="eva"),
        excludes("stride", "packing", why="whose rows do not overlap"),
        ordered("min_characters", "max_characters"),
    )

They are checked when a section is read, with file and line, and when a run is planned, for sections that Python code makes.
The help text and the guide list them.

A key is *given* if its value is not the default. `why` ends the message's first sentence.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxlm.core.redaction import redacted

GIVEN = object()
"""Stands for every value but the default."""
_SECTION = "a section"  # without a type


@dataclass(frozen=True)
class Rule:
    """What some keys of a section require of others.

    Attributes:
        text: the rule in one line, for help texts.
        keys: the keys that it names.
        problem: returns the key of a section that breaks the rule, and what is wrong with it; None if the section keeps it.
    """

    text: str
    keys: tuple[str, ...]
    problem: Callable[[Any], tuple[str, str] | None]


Rules = tuple[Rule, ...]


def only(*keys: str, when: str, is_: Any = GIVEN, why: str = "") -> Rule:
    """The keys have an effect only when another key has a value, one of several (a tuple), or any that is given."""

    def problem(section: Any) -> tuple[str, str] | None:
        key = next((key for key in keys if is_given(section, key)), None)
        if key is None or _is(section, when, is_):
            return None
        other = "" if is_ is GIVEN else f", but {when} is {_value(section, when)}"
        return (
            key,
            f"{_value(section, key)} given without {_condition(when, is_)}{_clause(why)}{other}. Remove it, or set {when}",
        )

    return Rule(f"{', '.join(keys)}: only with {_condition(when, is_)}", (*keys, when), problem)


def needs(*keys: str, when: str, is_: Any = GIVEN, why: str = "") -> Rule:
    """A value of a key, one of several, or any that is given, needs other keys to be given."""

    def problem(section: Any) -> tuple[str, str] | None:
        key = next((key for key in keys if not is_given(section, key)), None)
        if key is None or not _is(section, when, is_):
            return None
        return when, f"{_value(section, when)} given without {key}{_clause(why)}. Set {key}"

    return Rule(f"{_condition(when, is_)}: needs {', '.join(keys)}", (when, *keys), problem)


def excludes(*keys: str, when: str | None = None, is_: Any = GIVEN, why: str = "") -> Rule:
    """At most one of the keys is given; with `when`, none of them together with a value of that key."""

    def problem(section: Any) -> tuple[str, str] | None:
        given = [key for key in keys if is_given(section, key)]
        if when is not None:
            given = [*given[:1], when] if _is(section, when, is_) else []
        if len(given) < 2:
            return None
        return given[0], f"{_value(section, given[0])} {_beside(section, given[1])}{_clause(why)}. Remove one of them"

    if when is None:
        return Rule(f"at most one of {', '.join(keys)}", keys, problem)
    return Rule(f"{', '.join(keys)}: not with {_condition(when, is_)}", (*keys, when), problem)


def one_of(*keys: str, why: str = "") -> Rule:
    """Exactly one of the keys is given."""

    def problem(section: Any) -> tuple[str, str] | None:
        given = [key for key in keys if is_given(section, key)]
        if not given:
            return keys[0], f"none of {', '.join(keys)} given, exactly one expected{_clause(why)}. Set one of them"
        if given[1:]:
            first, second, *_ = given
            return first, f"{_value(section, first)} {_beside(section, second)}{_clause(why)}. Remove one of them"
        return None

    return Rule(f"exactly one of {', '.join(keys)}", keys, problem)


def some_of(*keys: str, why: str = "") -> Rule:
    """At least one of the keys is given."""

    def problem(section: Any) -> tuple[str, str] | None:
        if any(is_given(section, key) for key in keys):
            return None
        return keys[0], f"none of {', '.join(keys)} given, at least one expected{_clause(why)}. Set one of them"

    return Rule(f"at least one of {', '.join(keys)}", keys, problem)


def together(*keys: str, why: str = "") -> Rule:
    """Either all of the keys are given, or none."""

    def problem(section: Any) -> tuple[str, str] | None:
        given = [key for key in keys if is_given(section, key)]
        if len(given) in (0, len(keys)):
            return None
        first, missing = given[0], next(key for key in keys if key not in given)
        advice = f"Set all of {', '.join(keys)}, or none"
        return first, f"{_value(section, first)} given without {missing}{_clause(why)}. {advice}"

    return Rule(f"{', '.join(keys)}: all or none", keys, problem)


def ordered(*keys: str, strictly: bool = False, why: str = "") -> Rule:
    """The numbers or durations do not decrease from key to key (or increase, `strictly`). Null is left out."""
    sign = "<" if strictly else "<="

    def problem(section: Any) -> tuple[str, str] | None:
        values = [(key, value) for key in keys if (value := _value_of(section, key)) is not None]
        for (low, a), (high, b) in itertools.pairwise(values):
            if a > b or (strictly and a == b):
                return high, f"{b} given, but {low} is {a}{_clause(why)}. {low} {sign} {high} expected"
        return None

    return Rule(f" {sign} ".join(keys), keys, problem)


def unused(*keys: str, why: str) -> Rule:
    """The keys have no effect, so that none is given."""

    def problem(section: Any) -> tuple[str, str] | None:
        key = next((key for key in keys if is_given(section, key)), None)
        return None if key is None else (key, f"{_value(section, key)} given, but {why}. Remove it")

    return Rule(f"{', '.join(keys)}: no effect, because {why}", keys, problem)


@functools.cache
def rules_of(kind: type) -> Rules:
    """The rules of a section's class and of its bases."""
    return tuple(rule for base in reversed(kind.__mro__) for rule in vars(base).get("key_rules", ()))


def broken(section: Any) -> Iterator[tuple[str, str]]:
    """Yields the keys of a section that break its rules, each with what is wrong."""
    return filter(None, (rule.problem(section) for rule in rules_of(type(section))))


def as_default(problem: str) -> str:
    """Says that a value is the default, instead of that it is given. "None of these given" stays."""
    return re.sub(r"^(?!none of )(\S.*?) given\b", r"\1 is the default", problem)


def _value_of(section: Any, key: str) -> Any:
    """The value of a key, which may be one of a section inside; None if that is null."""
    for name in key.split("."):
        section = None if section is None else getattr(section, name)
    return section


def is_given(section: Any, key: str) -> bool:
    """Tells whether the value of a key is not its default."""
    *parents, name = key.split(".")
    inner = _value_of(section, ".".join(parents)) if parents else section
    if inner is None:
        return False
    field = next(field for field in dataclasses.fields(inner) if field.name == name)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return getattr(inner, name) != default


def _is(section: Any, key: str, values: Any) -> bool:
    if values is GIVEN:
        return is_given(section, key)
    value = _value_of(section, key)
    return any(isinstance(value, one) if isinstance(one, type) else value == one for one in _alternatives(values))


def _alternatives(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def _condition(key: str, values: Any) -> str:
    if values is GIVEN:
        return key
    return f"{key}: {' or '.join(map(_written, _alternatives(values)))}"


def _beside(section: Any, key: str) -> str:
    value = _value(section, key)
    return f"given together with {key}" + (f": {value}" if value != _SECTION else "")


def _value(section: Any, key: str) -> str:
    return _written(_value_of(section, key))


def _written(value: Any) -> str:
    """A value as YAML has it, shortened; a section by its `type`, if it has one."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kind = value if isinstance(value, type) else type(value)
    if dataclasses.is_dataclass(kind):
        named = getattr(kind, "get_choice_name", None)
        return _SECTION if named is None else f"{{type: {named(kind)}}}"
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return "sections" if any(map(dataclasses.is_dataclass, items)) else f"{redacted(str(value)):.60}"


def _clause(why: str) -> str:
    return f", {why}" if why else ""
