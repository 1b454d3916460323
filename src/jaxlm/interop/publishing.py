"""A folder that is complete or not there, whatever kills the process that writes it."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxlm.core.disk import sync
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import broadcast_from_main


def check_free(folder: Path) -> None:
    """Every process calls this before any of them writes: what process 0 sees counts.

    Raises:
        ConfigError: there is something of that name already.
    """
    if is_taken(folder):
        raise ConfigError(f"{folder} is there already. Name another folder, or move that one away")


def is_taken(folder: Path) -> bool:
    """Whether process 0 sees something there, other than an empty folder; the same answer on every process."""
    taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    return bool(broadcast_from_main(np.asarray(int(taken))))


@contextlib.contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """A folder to write into, beside the one whose name it takes once the block has ended and all bytes are on disk."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    unfinished.mkdir()
    try:
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        os.replace(unfinished, folder)  # an empty folder of that name is replaced
        sync(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
