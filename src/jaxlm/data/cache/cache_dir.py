"""Errors about `data.cache_dir`: folders that are not writable, disks that are full."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import DISK_FULL_ERRNOS


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
