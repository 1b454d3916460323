"""Writing so that a file or folder is either complete or not there, whatever kills the process."""

import contextlib
import errno
import glob
import os
import platform
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlm.core.disk import FULL, sync
from jaxlm.core.errors import ConfigError

_LOCK_NAME = ".lock"


def temporary(path: Path) -> Path:
    """A name beside `path` that nobody else takes: no other process of this host, and no other host on a shared disk."""
    return path.with_name(f"{path.name}.{platform.node()}-{secrets.token_hex(4)}.tmp")


def remove_leftovers(path: Path) -> None:
    """Deletes what processes of this host that were killed left of `temporary(path)`. Call it with the lock.

    Where a disk is shared, the lock may hold on each host alone: what others write is theirs.
    """
    for left in path.parent.glob(glob.escape(f"{path.name}.{platform.node()}-") + "*.tmp"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def prepared(folder: Path) -> Path:
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
def needing_space(folder: Path) -> Iterator[None]:
    """Around what writes to `folder`.

    Raises:
        ConfigError: the disk, or what this user may have of it, is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ConfigError(
            f"data.cache_dir: no space left for {folder}. What is finished stays: make room and start again"
        ) from error


@contextlib.contextmanager
def locked(folder: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Holds `folder` against other processes of this machine; the kernel lets go when the process dies.

    The lock file stays behind: deleting it while another process waits on it would let two in.
    """
    import fcntl  # not on Windows

    with open(folder / _LOCK_NAME, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            show(f"another process is writing in {folder}; waiting until it is done")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write; it takes the name `path` once the block has ended and the bytes are on disk."""
    unfinished = temporary(path)
    try:
        yield unfinished
        sync(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(path.parent)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to make and fill; it takes the name `folder` once the block has ended and its files are on disk.

    Call it with the lock.
    """
    remove_leftovers(folder)
    unfinished = temporary(folder)
    try:
        yield unfinished
        for path in unfinished.iterdir():
            sync(path)
        publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def publish(unfinished: Path, folder: Path) -> None:
    """Gives a folder whose files are all on disk its final name; where another host was faster, its folder stays."""
    sync(unfinished)
    try:
        os.rename(unfinished, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    sync(folder.parent)
