"""Where token caches are: keys of everything that determines their content, and the folder `data.cache_dir`."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import DISK_FULL_ERRNOS
from jaxlm.data.sources.record_files import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer


def writable_folder(folder: Path) -> Path:
    """Creates `folder` if necessary and returns it.

    Raises:
        ConfigError: the folder cannot be created or is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir: {folder} cannot be created: {error.strerror}. Choose another folder"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"data.cache_dir: {folder} is not writable. Choose another folder, or change its permissions")
    return folder


@contextlib.contextmanager
def disk_full_errors(folder: Path) -> Iterator[None]:
    """Converts errors of a full disk, raised while writing to `folder`, to `ConfigError`.

    Raises:
        ConfigError: the disk is full, or the user's quota is exhausted.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise ConfigError(
            f"data.cache_dir: no space left for {folder}. Free some space and start again; finished work is kept"
        ) from error


CacheKey = Mapping[str, Any]  # plain JSON; "files" maps each file's name to the SHA-256 of its content, in order

_NAMES_SHOWN = 5


def cache_key(files: Sequence[TextFile], tokenizer: Tokenizer, *, bos: bool | list[int], eos: bool) -> CacheKey:
    """The part of a token cache's key that does not depend on the format.

    Args:
        bos: whether documents begin with BOS, or the other ids that they begin with.
    """
    return {
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "enforce_bos": bos,
        "enforce_eos": eos,
        **files_key(files),
    }


def files_key(files: Sequence[TextFile]) -> dict[str, Any]:
    """The part of a key that identifies the text."""
    key: dict[str, Any] = {"files": file_digests(files)}
    if any(file.has_records for file in files):
        key["text_key"] = files[0].text_key
    return key


def file_digests(files: Sequence[TextFile]) -> dict[str, str]:
    """File name -> SHA-256 of the file's content."""
    with ThreadPoolExecutor() as pool:
        return dict(zip([f.name for f in files], pool.map(lambda file: file.digest, files), strict=True))


def check_cache_key(kind: str, folder: Path | str, before: CacheKey, now: CacheKey) -> None:
    """Compares the key of an existing cache with the current one.

    Args:
        kind: what was built (`token cache`), for the message.
        folder: its folder or URL, for the message.
        before: key of what is in `folder`.
        now: key that the configuration gives.

    Raises:
        ConfigError: the keys differ. The message lists the changes.
    """
    if before == now and list(before["files"]) == list(now["files"]):  # the order of the files matters
        return
    changes = [
        f"{key}: was {_short(before.get(key))}, is now {_short(now.get(key))}"
        for key in dict.fromkeys([*before, *now])
        if key != "files" and before.get(key) != now.get(key)
    ]
    changes += _file_changes(before["files"], now["files"])
    raise ConfigError(
        f"the {kind} {folder} was built from other inputs:\n  "
        + "\n  ".join(changes)
        + "\nChoose another data.cache_dir, or delete this folder to rebuild it"
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
