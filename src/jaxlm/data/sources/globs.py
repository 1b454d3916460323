"""Brace and wildcard patterns in URLs, for both local and remote files."""

import glob
import itertools
import re
from collections.abc import Sequence

from jaxlm.core.errors import ConfigError

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_FILES = 100_000  # per pattern; more is most likely a typo


def expand_braces(pattern: str, key: str) -> list[str]:
    """Expands `x-{1..3}.txt` and `{a,b}/x.txt`, in order. `{01..10}` keeps leading zeros. Braces may be nested.

    Args:
        key: config path of the pattern, for messages.

    Raises:
        ConfigError: the pattern expands to more than 100,000 files.
    """
    start = pattern.find("{")
    while start != -1:
        end = _closing(pattern, start)
        choices = [] if end is None else _choices(pattern[start + 1 : end], key)
        if end is not None and choices:
            rests = expand_braces(pattern[end + 1 :], key)
            heads = [head for choice in choices for head in expand_braces(choice, key)]
            _check_number(len(heads) * len(rests), pattern, key)
            return [pattern[:start] + head + rest for head in heads for rest in rests]
        start = pattern.find("{", start + 1)
    return [pattern]


def before_wildcards(parts: Sequence[str], has_wildcard=glob.has_magic) -> Sequence[str]:
    """The parts of a path before its first wildcard, never including the last part."""
    for number, part in enumerate(parts[:-1]):
        if has_wildcard(part):
            return parts[:number]
    return parts[:-1]


def common_folder(folders: Sequence[str]) -> str:
    """The innermost common folder; "" if there is none."""
    levels = zip(*(folder.rstrip("/").split("/") for folder in folders), strict=False)
    return "/".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels))


def _closing(pattern: str, start: int) -> int | None:
    depth = 0
    for position in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[position], 0)
        if depth == 0:
            return position
    return None


def _choices(inside: str, key: str) -> list[str]:
    """The alternatives inside braces; empty if the braces are literal characters."""
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        choices = _split(inside)
        return choices if len(choices) > 1 else []
    first, last = int(numbers[1]), int(numbers[2])
    _check_number(abs(last - first) + 1, f"{{{inside}}}", key)
    padded = any(len(text) > 1 and text.startswith("0") for text in numbers.groups())
    width = max(map(len, numbers.groups())) if padded else 0
    step = 1 if last >= first else -1
    return [f"{number:0{width}}" for number in range(first, last + step, step)]


def _split(inside: str) -> list[str]:
    """Splits at the commas outside nested braces."""
    choices, depth = [""], 0
    for character in inside:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            choices.append("")
        else:
            choices[-1] += character
    return choices


def _check_number(number: int, pattern: str, key: str) -> None:
    if number > _MAX_FILES:
        raise ConfigError(f"{key}: '{pattern}' expands to {number:,} files; at most {_MAX_FILES:,} are allowed")
