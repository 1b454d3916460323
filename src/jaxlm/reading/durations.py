"""Parsing and formatting of durations such as `15m` or `1h30m`."""

import re
from datetime import timedelta
from typing import Annotated, get_args

import draccus

from jaxlm.core.errors import ConfigError

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
