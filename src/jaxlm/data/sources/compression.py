"""Files that may be compressed, decompressed while they are read."""

import contextlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxlm.core.errors import ConfigError

COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
_CHUNK = 1 << 16


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Any, Callable[[], int]]]:
    """A file's content as a binary stream, and how many bytes of the file itself have been read for it so far."""
    with open(path, "rb") as file, _content(file, path.suffix) as stream:
        yield stream, file.tell


@contextlib.contextmanager
def damage_named(path: Path, place: Callable[[], str], *kinds: type[Exception]) -> Iterator[None]:
    """Around what reads a file.

    Args:
        place: how far reading has come, for the message: `line 3`.
        kinds: what else its format raises for damage.

    Raises:
        ConfigError: the file is truncated, or is not what its name says.
    """
    try:
        yield
    except (EOFError, OSError, lzma.LZMAError, zlib.error, *kinds) as error:
        if isinstance(error, ConfigError) or getattr(error, "errno", None) is not None:
            raise  # the operating system's: the file may be whole
        raise ConfigError(
            f"{path}: {place()}: the file is truncated, damaged, or not what its name says: {error}."
            " Replace the file, or leave it out of the URLs"
        ) from error


def _content(file: BinaryIO, suffix: str) -> contextlib.AbstractContextManager[Any]:
    if suffix == ".gz":
        import gzip

        return gzip.GzipFile(fileobj=file)
    if suffix == ".bz2":
        import bz2

        return bz2.BZ2File(file)
    if suffix == ".xz":
        return lzma.LZMAFile(file)
    if suffix == ".zst":
        import pyarrow as pa

        # Unlike the usual binding, this one notices where a frame is cut off.
        return io.BufferedReader(pa.CompressedInputStream(file, "zstd"), _CHUNK)  # pyright: ignore[reportArgumentType]
    return contextlib.nullcontext(file)
