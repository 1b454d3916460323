"""Atomic writes: files and folders are either complete or absent, even if the writing process is killed."""

import contextlib
import errno
import glob
import hashlib
import itertools
import os
import platform
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from jaxlm.core.errors import ConfigError

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


def temporary_path(path: Path) -> Path:
    """A unique temporary name next to `path`: unique across processes, and across hosts on a shared disk."""
    return path.with_name(f"{path.name}.{platform.node()}-{secrets.token_hex(4)}.tmp")


def remove_leftovers(path: Path) -> None:
    """Deletes the `temporary_path(path)` files of killed processes of this host; `folder / "*"` is every file of a folder.
    Hold the lock when you call it.

    On a shared disk the lock may only work within a host, so files of other hosts are kept: they may be in use.
    """
    name = path.name if path.name == "*" else glob.escape(path.name)
    for leftover in path.parent.glob(f"{name}.{glob.escape(platform.node())}-*.tmp"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def folder_lock(folder: Path, log: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
    """Locks `folder` against other processes of this machine. The kernel releases the lock if the process dies.

    The lock file is not deleted: if another process waits on a deleted file, two processes could hold the lock.
    """
    waiting = f"another process is writing to {folder}; waiting for it to finish"
    return exclusive(folder / ".lock", lambda: log(waiting))


@contextlib.contextmanager
def exclusive(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Locks a file, which is created if it is missing, against other processes and threads of this machine.

    Some network file systems have no locks. Then a file of the local disk that stands for this one is locked instead.

    Args:
        waiting: called if another process has locked it.
    """
    with contextlib.ExitStack() as closing:
        try:
            lock(closing.enter_context(open(path, "a")), waiting)
        except NoLocksError:
            lock(closing.enter_context(open(_stand_in(path), "a")), waiting)
        yield


class NoLocksError(ConfigError):
    """The file system of a file has no locks. Other errors do not say this: whether the file is locked is then unknown."""


def lock(file: IO[Any], waiting: Callable[[], None] | None = None, *, shared: bool = False) -> None:
    """Locks an open file until it is closed.

    Args:
        waiting: called if another process has locked it, before this one waits; without it, none waits.

    Raises:
        BlockingIOError: another process has locked it.
        NoLocksError: its file system has no locks.
        ConfigError: it cannot be locked for another reason.
    """
    import fcntl  # not on Windows

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise
            waiting()
            fcntl.flock(file, kind)
    except BlockingIOError:
        raise
    except OSError as error:
        raise (NoLocksError if error.errno in _NO_LOCKS else ConfigError)(
            f"{file.name} cannot be locked ({error.strerror}), and another process may be writing to its folder. Check the"
            " disk, or choose a folder on another one"
        ) from error


def _stand_in(path: Path) -> Path:
    folder = Path(tempfile.gettempdir()) / f"jaxlm-locks-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder}: a folder expected that only you can open, because it holds locks for disks that have none, but it"
            " is a link, a file, or open to others. Remove it, or set TMPDIR to a folder of your own"
        )
    return folder / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()


def free_path(path: Path) -> Path:
    """The path, or `<path>.2`, `<path>.3` and so on if it is taken."""
    taken = (path.with_name(f"{path.name}.{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], taken) if not candidate.exists())


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to. When the block ends, the file is synced to disk and renamed to `path`."""
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
    """Yields the path of a temporary folder to create and fill. When the block ends, its files are synced to disk and the
    folder is renamed to `folder`. Hold the lock when you call it.
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
    """Renames a folder whose files are all on disk to its final name. If another host was faster, keeps that host's."""
    fsync(unfinished)
    try:
        os.rename(unfinished, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    fsync(folder.parent)


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a full disk, an exceeded quota, or a limit on the size of files."""


def fsync(path: Path) -> None:
    """Waits until the content of a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
