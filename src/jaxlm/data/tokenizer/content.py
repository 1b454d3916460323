"""Checks of a tokenizer.json that the library does not make: it would take all memory, or give two tokens one id."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError

_LARGEST_VOCABULARY = 1 << 24
_MOST_GROWTH = 1000
_GROWTH = {"ByteLevel": 4.0, "Precompiled": 18.0}  # bytes of a character; NFKC's longest expansion
_MATCHES_NOTHING = re.compile(r"[*?|^$]|\\[bBAzZG]|\{0?,|''")  # what a regular expression that can match no text has


def check_content(content: Mapping[str, Any], file: Path) -> None:
    """Raises `ConfigError` for what the library would hold in memory, whatever its size, and for tokens with one id."""
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        if (growth := _growth(content.get(name))) > _MOST_GROWTH:
            raise ConfigError(
                f"data.tokenizer: '{file}': its {name} can make a text {growth:.2g} times as long, at most {_MOST_GROWTH:,}"
                " times expected. Use another tokenizer.json"
            )
    vocabulary = content["model"].get("vocab")
    given = vocabulary.items() if isinstance(vocabulary, dict) else ()
    ids = [(token, number) for token, number in given if isinstance(number, int)]
    tokens = {number: token for token, number in ids}
    if len(tokens) < len(ids):
        token, number = next((token, number) for token, number in ids if tokens[number] != token)
        raise ConfigError(
            f"data.tokenizer: '{file}' has the tokens {token!r} and {tokens[number]!r} with the same id {number}. Download or"
            " train it again"
        )
    if (largest := max(tokens, default=0)) >= _LARGEST_VOCABULARY:
        raise ConfigError(
            f"data.tokenizer: '{file}' has a token with the id {largest:,}, below {_LARGEST_VOCABULARY:,} expected."
            " Download or train it again"
        )


def _growth(stage: Any) -> float:
    """Returns how many times as long a text can become in a stage of tokenizer.json, and in all that are in it."""
    if not isinstance(stage, dict):
        return math.prod(map(_growth, stage)) if isinstance(stage, list) else 1.0
    pattern, content = stage.get("pattern"), stage.get("content")
    if stage.get("type") != "Replace" or not isinstance(pattern, dict) or not isinstance(content, str):
        return _GROWTH.get(str(stage.get("type")), 1.0) * math.prod(map(_growth, stage.values()))
    text = pattern.get("String")
    if isinstance(text, str) and text:
        return max(1.0, len(content) / len(text))
    return len(content) + 1.0 if _MATCHES_NOTHING.search(str(pattern)) else max(1.0, len(content))
