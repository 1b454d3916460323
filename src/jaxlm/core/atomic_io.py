"""Files and folders that are either complete or absent, whatever kills the process that writes them."""

import contextlib
import errno
import glob
import os
import platform
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import broadcast_from_main

_LOCK_NAME = ".lock"


def temporary_path(path: Path) -> Path:
    """A name beside `path` that nobody else takes: no other process of this host, and no other host on a shared disk."""
    return path.with_name(f"{path.name}.{platform.node()}-{secrets.token_hex(4)}.tmp")


def remove_leftovers(path: Path) -> None:
    """Deletes what processes of this host that were killed left of `temporary(path)`. Call it with the lock.

    Where a disk is shared, the lock may hold on each host alone: what others write is theirs.
    """
    for left in path.parent.glob(glob.escape(f"{path.name}.{platform.node()}-") + "*.tmp"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


@contextlib.contextmanager
def folder_lock(folder: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Holds `folder` against other processes of this machine; the kernel lets go when the process dies.

    The lock file stays behind: deleting it while another process waits on it would let two in.
    """
    import fcntl  # not on Windows

    with open(folder / _LOCK_NAME, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"another process is writing in {folder}; waiting until it is done")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path to write; it takes the name `path` once the block has ended and the bytes are on disk."""
    unfinished = temporary_path(path)
    try:
        yield unfinished
        fsync(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    fsync(path.parent)


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to make and fill; it takes the name `folder` once the block has ended and its files are on disk.

    Call it with the lock.
    """
    remove_leftovers(folder)
    unfinished = temporary_path(folder)
    try:
        yield unfinished
        for path in unfinished.iterdir():
            fsync(path)
        commit_folder(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def commit_folder(unfinished: Path, folder: Path) -> None:
    """Gives a folder whose files are all on disk its final name; where another host was faster, its folder stays."""
    fsync(unfinished)
    try:
        os.rename(unfinished, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    fsync(folder.parent)


FULL = (errno.ENOSPC, errno.EDQUOT)
"""The disk, or what this user may have of it, is full."""


def fsync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_unused(folder: Path) -> None:
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
def publish_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, beside the one whose name it takes once the block has ended and all bytes are on disk."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    unfinished.mkdir()
    try:
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            fsync(path)
        os.replace(unfinished, folder)  # an empty folder of that name is replaced
        fsync(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
