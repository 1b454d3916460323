"""A folder that is complete or not there, whatever kills the process that writes it."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxlm.core.errors import ConfigError


@contextlib.contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """A folder to write into, beside the one whose name it takes once the block has ended and all bytes are on disk.

    Raises:
        ConfigError: there is something of that name already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already. Name another folder, or move that one away")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    unfinished.mkdir()
    try:
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        os.replace(unfinished, folder)  # an empty folder of that name is replaced
        _sync(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
