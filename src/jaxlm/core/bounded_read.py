"""Reads files that this run has not just written, without trusting that they are files or that they end.

A pipe waits forever, a device never ends, and a damaged file may be one line of any length. Everything that reads a whole
file, or a line of it, does so here.
"""

import errno
import functools
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from jaxlm.core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

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
