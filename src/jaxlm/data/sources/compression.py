"""Reads files, decompressing them on the fly."""

import contextlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import open_regular

COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
_CHUNK = 1 << 16


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[Any, Callable[[], int]]]:
    """The decompressed content as a binary stream, and a function for the position in the (compressed) file."""
    with open_regular(path) as file, _content(file, path.suffix) as stream:
        yield stream, file.tell


@contextlib.contextmanager
def damaged_file_errors(path: Path, position: Callable[[], str], *kinds: type[Exception]) -> Iterator[None]:
    """Converts errors of a damaged file, raised while reading it, to `ConfigError`.

    Args:
        position: describes the current position in the file, for the message (`line 3`).
        kinds: further exceptions that the file's format raises for damage.

    Raises:
        ConfigError: the file is truncated or damaged, or its content does not match its suffix.
    """
    try:
        yield
    except (EOFError, OSError, lzma.LZMAError, zlib.error, *kinds) as error:
        if isinstance(error, ConfigError) or getattr(error, "errno", None) is not None:
            raise  # an error of the operating system; the file itself may be fine
        raise ConfigError(
            f"{path}: {position()}: the file is truncated or damaged, or its content does not match its suffix: {error}."
            " Replace the file, or remove it from the URLs"
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

        # Unlike the package zstandard, Arrow detects truncated frames.
        return io.BufferedReader(pa.CompressedInputStream(file, "zstd"), _CHUNK)  # pyright: ignore[reportArgumentType]
    return contextlib.nullcontext(file)
