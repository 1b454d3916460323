"""Reads files that may be damaged, endless or no files, and writes files that are complete or absent.

What this run has not just written is read without trust. A pipe waits forever, a device never ends, and a damaged file may
be one line of any length. Everything that reads a whole file, or a line of it, does so here.
"""

import contextlib
import errno
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import platform
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from jaxlm.core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

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
        remove(leftover)


def remove(path: Path) -> None:
    """Deletes a folder with all files, a file, or a link, which leaves what it points to."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


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
    folder is renamed to `folder`, unless another host was faster. Hold the lock when you call it.
    """
    remove_leftovers(folder)
    unfinished = temporary_path(folder)
    try:
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            fsync(path)
        try:
            os.rename(unfinished, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
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


SMALL = 64 << 20
"""Bytes of a file that people write, or that describes another one: settings, templates, manifests."""
_PIECE = 16 << 20
_SHARE_OF_MEMORY = 8  # what is parsed needs several times the memory of its text


class UnreadableFileError(OSError, ConfigError):
    """A file is not a regular one, or too large. To most callers it is as damaged as one that the disk cannot read."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}. Replace the file, or remove it"


def largest() -> int:
    """The most bytes of a file, or of a line, that are held in memory: an eighth of the machine's."""
    return max(SMALL, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE_OF_MEMORY)


def listed_file(folder: Path, name: str) -> Path:
    """Finds a file that another file of a folder lists. Raises `ConfigError` for a name that leads out of it."""
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(
            f"{folder}: {name!r} is listed, the name of a file in this folder expected. Download it again"
        )
    return folder / name


def open_regular(path: Path | str) -> io.BufferedReader:
    """Opens a file to read bytes. Raises `UnreadableFileError` for a pipe, a device or a socket."""
    # Without O_NONBLOCK, opening a pipe waits until somebody writes to it. It has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise _unreadable(path, kind, os.strerror(kind) if stat.S_ISDIR(mode) else "it is not a regular file")
    return os.fdopen(descriptor, "rb")


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text. Raises `ValueError` for anything else, such as what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:  # no cause: its traceback has a thousand lines
        raise ValueError("it is nested too deeply") from None


def map_array(path: Path | str) -> "np.ndarray":
    """Maps the array of a .npy file into memory. Raises `ConfigError` if it is anything else, and `OSError`."""
    import numpy as np

    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python
        raise ConfigError(f"{path}: not an array written by numpy.save ({error})") from error
    if not isinstance(array, np.ndarray):
        raise ConfigError(f"{path}: not an array written by numpy.save, but an archive of several. Save each of them")
    return array


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content. Raises `OSError`."""
    status = path.stat()
    return _sha256(path.resolve(), status.st_size, status.st_mtime_ns)


@functools.cache
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    # Size and mtime are only cache keys: the file is read again if they change.
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bytes(path: Path | str, limit: int | None = None) -> bytes:
    """The content of a file.

    Args:
        limit: the most bytes; None for `largest`.

    Raises:
        UnreadableFileError: it is not a regular file, or larger.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        return read_stream(file, path, limit)


def read_text(path: Path | str, limit: int | None = SMALL) -> str:
    """The content of a UTF-8 file. Raises like `read_bytes`, and `UnicodeDecodeError`."""
    return read_bytes(path, limit).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_stream(stream: BinaryIO, path: Path | str, limit: int | None = None) -> bytes:
    """All bytes of a stream, such as a decompressed one. Args: path: for the message. Raises like `read_bytes`."""
    most = largest() if limit is None else limit
    try:
        content = _read_up_to(stream, most + 1)
    except MemoryError as error:
        raise _unreadable(path, errno.ENOMEM, "it needs more memory than there is") from error
    if len(content) > most:
        raise _too_large(path, "it", most)
    return content


def _read_up_to(stream: BinaryIO, limit: int) -> bytes:
    """In pieces: `read(limit)` reserves memory for all of them, however short the stream is."""
    content = io.BytesIO()
    while piece := stream.read(min(_PIECE, limit - content.tell())):
        content.write(piece)
    return content.getvalue()


def read_lines(stream: BinaryIO, path: Path | str) -> Iterator[bytes]:
    """The lines of a stream. Raises `UnreadableFileError` for one that is longer than `largest`."""
    most, number = largest(), 0
    while line := stream.readline(most + 1):
        number += 1
        if len(line) > most:
            raise _too_large(path, f"line {number}", most)
        yield line


def read_stored(fs: Any, path: str) -> bytes:
    """The content of a file in a store. Args: fs: a file system of fsspec. Raises like `read_bytes`, and what `fs` raises."""
    most = largest()
    if (fs.size(path) or 0) > most:
        raise _too_large(path, "it", most)
    return fs.cat_file(path)


def _too_large(path: Path | str, what: str, limit: int) -> UnreadableFileError:
    return _unreadable(path, errno.EOVERFLOW, f"{what} has more than {limit:,} bytes")


def _unreadable(path: Path | str, number: int, problem: str) -> UnreadableFileError:
    return UnreadableFileError(number, problem, str(path))  # pyright: ignore[reportCallIssue] # OSError's, not ConfigError's


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: the file cannot be read, or contains anything else.
    """
    try:
        content = parse_json(read_text(file, limit=None))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise ConfigError(f"{file} is not JSON: {error}. Download or write it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: a JSON object ({{...}}) expected, {type(content).__name__} found")
    return content


def read_json_lines(path: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a file of JSON lines, each with its place. Raises `ConfigError`. Args: key: what names the file."""
    with open_regular(path) as file:
        for number, content in enumerate(read_lines(file, path), start=1):
            if not content.strip():
                continue
            place = f"{path}, line {number}"
            try:
                line = content.decode()
                record = parse_json(line)
                json.dumps(record, ensure_ascii=False).encode()
            except UnicodeDecodeError as error:
                raise ConfigError(f"{key}: {place}: not UTF-8 text: {error}. Save the file as UTF-8") from error
            except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
                raise ConfigError(f"{key}: {place}: not valid Unicode: {error}. Correct the text") from error
            except ValueError as error:
                raise ConfigError(f"{key}: {place}: not a JSON object: {error}") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{key}: {place}: a JSON object expected, but it is {line.strip()[:60]}")
            yield place, record
