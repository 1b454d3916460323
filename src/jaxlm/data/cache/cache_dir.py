"""Writing so that a file or folder is either complete or not there, whatever kills the process."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jaxlm.core.atomic_io import DISK_FULL_ERRNOS
from jaxlm.core.errors import ConfigError


def writable_folder(folder: Path) -> Path:
    """A folder that exists and can be written.

    Raises:
        ConfigError: it cannot; `data.cache_dir` is what put it there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"data.cache_dir: {folder} cannot be made: {error.strerror}. Choose another") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"data.cache_dir: {folder} cannot be written. Choose another, or change its permissions")
    return folder


@contextlib.contextmanager
def disk_full_errors(folder: Path) -> Iterator[None]:
    """Around what writes to `folder`.

    Raises:
        ConfigError: the disk, or what this user may have of it, is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise ConfigError(
            f"data.cache_dir: no space left for {folder}. What is finished stays: make room and start again"
        ) from error
