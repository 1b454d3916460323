"""Braces and wildcards in URLs, the same for local and remote ones."""

import glob
import re
from collections.abc import Sequence

from jaxlm.core.errors import ConfigError

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST = 100_000  # files of one pattern; more is a slip of the keyboard


def expand_braces(pattern: str, key: str) -> list[str]:
    """`x-{1..3}.txt` and `{a,b}/x.txt` written out, in order; `{01..10}` keeps its zeros. Braces may be nested.

    Args:
        key: where the pattern is configured, for messages.

    Raises:
        ConfigError: more than 100,000 of them.
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
    """The folders of a path in front of its first wildcard; the last part is never among them."""
    for number, part in enumerate(parts[:-1]):
        if has_wildcard(part):
            return parts[:number]
    return parts[:-1]


def common_folder(folders: Sequence[str]) -> str:
    """The innermost folder that all of them are in, or are; "" where they share none."""
    shared = folders[0].rstrip("/").split("/")
    for folder in folders[1:]:
        parts = folder.rstrip("/").split("/")
        same = [a == b for a, b in zip(shared, parts, strict=False)]
        shared = shared[: (*same, False).index(False)]
    return "/".join(shared)


def _closing(pattern: str, start: int) -> int | None:
    depth = 0
    for place in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[place], 0)
        if depth == 0:
            return place
    return None


def _choices(inside: str, key: str) -> list[str]:
    """What braces offer; nothing where they are no more than braces in a name."""
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        choices = _split(inside)
        return choices if len(choices) > 1 else []
    first, last = int(numbers[1]), int(numbers[2])
    _check_number(abs(last - first) + 1, f"{{{inside}}}", key)
    padded = any(len(text) > 1 and text.startswith("0") for text in numbers.groups())
    width = max(map(len, numbers.groups())) if padded else 0
    way = 1 if last >= first else -1
    return [f"{number:0{width}}" for number in range(first, last + way, way)]


def _split(inside: str) -> list[str]:
    """At the commas that are in no further braces."""
    choices, depth = [""], 0
    for character in inside:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            choices.append("")
        else:
            choices[-1] += character
    return choices


def _check_number(number: int, pattern: str, key: str) -> None:
    if number > _MOST:
        raise ConfigError(f"{key}: '{pattern}' stands for {number:,} files; at most {_MOST:,} can be written so")
