"""What a token cache or a tokenizer was made from: everything that decides about its content, and nothing else."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer

CacheKey = Mapping[str, Any]  # plain JSON; "files" maps each file's name to the SHA-256 of its content, in order

_NAMES_SHOWN = 5


def cache_key(files: Sequence[TextFile], tokenizer: Tokenizer, *, bos: bool, eos: bool) -> CacheKey:
    """Of a token cache."""
    made_from = {
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "enforce_bos": bos,
        "enforce_eos": eos,
        "files": content_of(files),
    }
    if any(file.has_records for file in files):
        made_from["text_key"] = files[0].text_key
    return made_from


def tokenizer_key(files: Sequence[TextFile], vocab_size: int) -> dict[str, Any]:
    """Of a tokenizer that is trained here."""
    made_from = {"vocab_size": vocab_size, "files": content_of(files)}
    if any(file.has_records for file in files):
        made_from["text_key"] = files[0].text_key
    return made_from


def content_of(files: Sequence[TextFile]) -> dict[str, str]:
    """SHA-256 of each file's content, by its name."""
    with ThreadPoolExecutor() as pool:
        return dict(zip([f.name for f in files], pool.map(lambda file: file.digest, files), strict=True))


def _same(before: CacheKey, now: CacheKey) -> bool:
    """Whether both give the same, byte for byte. The order of files counts."""
    return before == now and list(before["files"]) == list(now["files"])


def check_same(what: str, folder: Path, before: CacheKey, now: CacheKey) -> None:
    """Raises `ConfigError` that says what has changed, unless nothing has.

    Args:
        what: was made (`token cache`), for the message.
    """
    if _same(before, now):
        return
    changes = [
        f"{key}: {_short(before.get(key))} then, {_short(now.get(key))} now"
        for key in dict.fromkeys([*before, *now])
        if key != "files" and before.get(key) != now.get(key)
    ]
    changes += _file_changes(before["files"], now["files"])
    raise ConfigError(
        f"the {what} {folder} was made from something else:\n  "
        + "\n  ".join(changes)
        + "\nChoose another data.cache_dir, or delete this one to build it anew"
    )


def _file_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    groups = {
        "files added": now.keys() - before.keys(),
        "files removed": before.keys() - now.keys(),
        "files changed": {name for name in before.keys() & now.keys() if before[name] != now[name]},
    }
    changes = []
    for label, names in groups.items():
        if names:
            listed = ", ".join(sorted(names)[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
            changes.append(f"{label}: {len(names)} ({listed})")
    if before == now and list(before) != list(now):
        changes.append("the order of the files")
    return changes


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 15 else str(value)
