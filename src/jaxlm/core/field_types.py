"""Types of the fields of configuration classes: numbers with a range (`rank: PositiveInt = 8`), descriptions, checks.

The decoder of the YAML refuses a value that its field's type does not accept; `check_fields` does the same for sections that
Python code or another program's file defines. What becomes a float32 or an int32 in a program must be representable there.
"""

import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval

from jaxlm.core.errors import ConfigError, shown
from jaxlm.core.rules import as_default, broken, is_given

LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = float(np.finfo(np.float32).max)
SMALLEST_FLOAT = float(np.finfo(np.float32).tiny)
"""Smaller positive numbers are 0 on devices that flush subnormal numbers, and 1 divided by them may overflow."""


def is_float32(value: Any) -> bool:
    """Tells whether float32 can hold a number, which may be an integer of any size."""
    return -LARGEST_FLOAT <= value <= LARGEST_FLOAT


def what_float32_needs(value: Any) -> str:
    """Says what a value that float32 cannot hold should have been, for messages."""
    is_finite = issubclass(type(value), numbers.Real) and -math.inf < value < math.inf
    return f"a number from -{LARGEST_FLOAT:.2g} to {LARGEST_FLOAT:.2g} (float32)" if is_finite else "a finite number"


PositiveInt = Annotated[int, Interval(ge=1, le=LARGEST_INT)]
NonNegativeInt = Annotated[int, Interval(ge=0, le=LARGEST_INT)]
FilterSize = Annotated[int, Interval(ge=2, le=1000)]
NumLayers = Annotated[int, Interval(ge=1, le=10_000)]
NumStacks = Annotated[int, Interval(ge=1, le=128)]
NumReplicas = Annotated[int, Interval(ge=1, le=1000)]
NumDigits = Annotated[int, Interval(ge=1, le=1000)]
NumCharacters = Annotated[int, Interval(ge=1, le=10_000_000)]
NumTimeSteps = Annotated[int, Interval(ge=1, le=100_000)]
"""A run plans or reads something for each of these. Many more are a slip, with which it would not come to its first step."""
TimeFeatures = Annotated[int, Interval(ge=1, le=16_384)]
"""A model has a matrix with the square of these."""
PositiveFloat = Annotated[float, Interval(gt=0, ge=SMALLEST_FLOAT, le=LARGEST_FLOAT)]
NonNegativeFloat = Annotated[float, Interval(ge=0, le=LARGEST_FLOAT)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
PositiveFraction = Annotated[float, Interval(gt=0, ge=SMALLEST_FLOAT, le=1)]
ProperFraction = Annotated[float, Interval(gt=0, ge=SMALLEST_FLOAT, lt=1)]
AtLeastOne = Annotated[float, Interval(ge=1, le=LARGEST_FLOAT)]
AboveOne = Annotated[float, Interval(gt=1, le=LARGEST_FLOAT)]
BelowOne = Annotated[float, Interval(ge=0, lt=1)]
"""Probabilities of dropout, decay rates of moving means."""
Seconds = Annotated[float, Interval(ge=0.001, le=LARGEST_INT)]
"""To wait. The clocks of systems end at some 1e10 seconds."""
STEPS_OF_PHASE = "steps of a phase"
"""Marks a number of steps after which something happens, `Annotated[PositiveInt, STEPS_OF_PHASE]`: in a shorter phase it
never does, which the start of a run says."""
LearningRate = Annotated[float, Interval(ge=0, le=1000)]
ScheduleLength = NonNegativeInt | Annotated[float, Interval(ge=0, le=LARGEST_INT)]
"""An integer is a number of steps, so 1 is one step. A float up to 1.0 is a fraction, so 1.0 is all; above, whole steps."""
PositiveScheduleLength = PositiveInt | Annotated[float, Interval(gt=0, ge=SMALLEST_FLOAT, le=LARGEST_INT)]
Seed = Annotated[int, Interval(ge=0, le=2**32 - 1)]

_SIMPLE = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a string",
    timedelta: "a duration (15m)",
}


@functools.cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """Field -> type of a dataclass. Of what annotates the types, only ranges are kept."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: _with_range_alone(hint) for name, hint in hints.items()}


@functools.cache
def _phase_steps_of(kind: type) -> tuple[str, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    is_marked = lambda hint: any(STEPS_OF_PHASE in getattr(one, "__metadata__", ()) for one in _members(hint))  # noqa: E731
    return tuple(name for name, hint in hints.items() if is_marked(hint))


def beyond(section: Any, num_steps: int, prefix: str = "") -> list[str]:
    """Finds the keys that wait for more steps than a phase has, in a section and in changed sections within it."""
    values = {name: getattr(section, name) for name in _phase_steps_of(type(section))}
    lines = [f"{prefix}{name}: {value}" for name, value in values.items() if (value or 0) > num_steps]
    for field in dataclasses.fields(section):
        value, default = getattr(section, field.name), field.default_factory
        if dataclasses.is_dataclass(value) and (default is dataclasses.MISSING or value != default()):
            lines += beyond(value, num_steps, f"{prefix}{field.name}.")
    return lines


def _with_range_alone(hint: Any) -> Any:
    if typing.get_origin(hint) is not Annotated:
        return hint
    bounds = bounds_of(hint)
    return hint.__origin__ if bounds is None else Annotated[hint.__origin__, bounds]


def bounds_of(hint: Any) -> Interval | None:
    """The bounds of a type from this file; None for other types."""
    if typing.get_origin(hint) is not Annotated:
        return None
    return next((item for item in hint.__metadata__ if isinstance(item, Interval)), None)


def in_range(number: float, bounds: Interval) -> bool:
    """Tells whether a number is within bounds. NaN never is."""
    low = -math.inf if bounds.ge is None else bounds.ge
    high = math.inf if bounds.le is None else bounds.le
    above, below = bounds.gt, bounds.lt
    return low <= number <= high and (above is None or number > above) and (below is None or number < below)  # pyright: ignore[reportOperatorIssue]


_FLOAT32 = Interval(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)
_LIMITS = {"gt": "above {}", "ge": "{} or more", "lt": "below {}", "le": "at most {}"}


def describe_limits(bounds: Interval, value: Any = None) -> str:
    """Bounds in words, as in "0 or more and below 1".

    Args:
        value: the value that is not within them. The limits of int32 and float32 are only named if this is beyond them.
    """
    number = value if isinstance(value, (int, float)) else 0
    is_tiny = 0 < number < SMALLEST_FLOAT and bounds.ge == SMALLEST_FLOAT
    hidden = [None, 0 if is_tiny else SMALLEST_FLOAT]
    # "finite" and "an integer" say enough of infinity and NaN.
    hidden += [limit for limit in (LARGEST_INT, LARGEST_FLOAT) if not limit < number < math.inf]
    hidden += [] if -math.inf < number < -LARGEST_FLOAT else [-LARGEST_FLOAT]
    limits = {name: getattr(bounds, name) for name in _LIMITS if getattr(bounds, name) not in hidden}
    rounded = {SMALLEST_FLOAT: "1.2e-38", LARGEST_FLOAT: "3.4e+38", -LARGEST_FLOAT: "-3.4e+38"}  # all within the bounds
    return " and ".join(_LIMITS[name].format(rounded.get(limit, limit)) for name, limit in limits.items())


def describe_type(hint: Any, value: Any = None) -> str:
    """Describes the values that a field's type accepts, as in "an integer of 1 or more or null".

    Args:
        value: the value that it does not accept.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(argument, value) for argument in arguments)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is list:
        return f"a list (each entry {describe_type(arguments[0], value)})"
    if origin is dict:
        return f"a mapping (each value {describe_type(arguments[1], value)})"
    if hint is type(None):
        return "null"
    bounds = _FLOAT32 if hint is float else bounds_of(hint)
    if bounds is None:
        return _SIMPLE.get(hint, "a section with keys")
    kind, limits = _SIMPLE[arguments[0] if arguments else hint], describe_limits(bounds, value)
    return f"{kind} {'' if limits.startswith(('above', 'below')) else 'of '}{limits}" if limits else kind


def check_field(kind: type, name: str, value: Any, path: str) -> None:
    """Raises `ConfigError` if a field of the dataclass `kind` does not accept a value. Args: path: of the section."""
    _check(hints_of(kind)[name], value, f"{path}.{name}")


def check_fields(section: Any, path: str = "") -> None:
    """Raises `ConfigError` for the first value of a section, or of a section in it, that its field's type does not accept, or
    that breaks a rule of its section.

    Args:
        path: its dotted path, for messages; `--` if its fields are options of a command.
    """
    prefix = path if path in ("", "--") else f"{path}."
    hints = hints_of(type(section))
    for field in dataclasses.fields(section):
        _check(hints[field.name], getattr(section, field.name), f"{prefix}{field.name}")
    for key, problem in broken(section):
        raise ConfigError(f"{prefix}{key}: {problem if is_given(section, key) else as_default(problem)}")


def check_simple(hint: Any, value: Any, name: str) -> None:
    """Raises `ConfigError` if a type of numbers, texts or booleans does not accept an argument of a function."""
    if not any(_accepts(member, value) for member in _members(hint)):
        text = "null" if value is None else shown(value)
        raise ConfigError(f"{name}: {text} given, {describe_type(hint, value)} expected")


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _check(hint: Any, value: Any, path: str) -> None:
    members = _members(hint)
    if all(map(_is_simple, members)):
        check_simple(hint, value, path)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        check_fields(value, path)
    elif isinstance(value, Mapping) and (kind := _items(members, dict)):
        for key, item in value.items():
            _check(kind, item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)) and (kind := _items(members, list)):
        for number, item in enumerate(value):
            _check(kind, item, f"{path}.{number}")
    else:
        check_simple(hint, value, path)


def _is_simple(member: Any) -> bool:
    """Tells whether a type that is not a union accepts neither sections nor containers."""
    of_numbers = bounds_of(member) is not None or typing.get_origin(member) is Literal
    return of_numbers or member is type(None) or member in _SIMPLE


def _items(members: tuple[Any, ...], container: type) -> Any:
    """The type of the items of the container among `members`; None if there is none, or if it does not say."""
    return next((typing.get_args(member)[-1] for member in members if typing.get_origin(member) is container), None)


def _accepts(member: Any, value: Any) -> bool:
    """Tells whether a type that is not a union accepts a value that is neither a section nor a container."""
    if (bounds := bounds_of(member)) is not None:
        return _accepts(typing.get_args(member)[0], value) and in_range(value, bounds)
    if typing.get_origin(member) is Literal:
        return value in typing.get_args(member)
    if member in (int, float):
        kind: Any = numbers.Integral if member is int else numbers.Real  # of numpy too, in Python code
        return isinstance(value, kind) and not isinstance(value, bool) and -math.inf < value < math.inf
    return member is Any or isinstance(value, typing.get_origin(member) or member)
