"""Writing so that a file or folder is either complete or not there, whatever kills the process."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlm.core.errors import ConfigError

_LOCK_NAME = ".lock"


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
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
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
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def publish(unfinished: Path, folder: Path) -> None:
    """Gives a folder whose files are all on disk its final name."""
    sync(unfinished)
    os.rename(unfinished, folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
