"""Keeps arrays that follow from the tokens of a cache on disk: computed once, memory-mapped from then on.

Small arrays are in one file (`open_or_compute`):

<cache_dir>/derived/<digest of the key>.npz    the key, and the arrays by name

The index says which tokens of a cache each row consists of (`open_or_index`):

<folder of the source>/packed/<digest of the key>/firsts.npy     int64 [rows + 1]
                                                  starts.npy     int64 [pieces]
                                                  lengths.npy    int32 [pieces]
                                                  waiting.npy    int64 [documents, 2], if documents still wait
                                                  index.json     the key, counts, and checksums

Both follow from their key, so what is damaged is computed again.
"""

import hashlib
import json
import os
import shutil
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxlm.core.safe_io import atomic_file, atomic_folder, folder_lock, read_bytes, remove_leftovers
from jaxlm.data.base import Log
from jaxlm.data.cache.cache_key import disk_full_errors, writable_folder

Arrays = dict[str, np.ndarray]
_KEY = "made_from"


def open_or_compute(
    folder: Path, made_from: Mapping[str, Any], compute: Callable[[], Mapping[str, np.ndarray]], log: Log
) -> Arrays:
    """Reads the arrays that were made from these inputs, and computes them first if there are none.

    Args:
        folder: where the files are. If it cannot be written, the arrays stay in memory.
        made_from: everything that determines the arrays. Plain JSON.

    Raises:
        ConfigError: the disk is full.
    """
    key = json.dumps(made_from, sort_keys=True)
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    if (cached_arrays := _read(path, key)) is not None:
        return cached_arrays
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        return dict(compute())
    with folder_lock(writable_folder(folder), log), disk_full_errors(path):
        if (cached_arrays := _read(path, key)) is not None:  # another process was faster
            return cached_arrays
        computed = dict(compute())
        remove_leftovers(path)
        stored: dict[str, Any] = {_KEY: np.array(key), **computed}
        with atomic_file(path) as unfinished, unfinished.open("wb") as file:
            np.savez(file, **stored)
    return computed


def _read(path: Path, key: str) -> Arrays | None:
    """None if there is no file, or it is damaged."""
    try:
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in stored.files}  # a zip archive, which has checksums
        return arrays if str(arrays.pop(_KEY)) == key else None
    except (OSError, ValueError, KeyError, TypeError, EOFError, SyntaxError, tokenize.TokenError):
        return None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError):
        return None


_METADATA = "index.json"


@dataclass(frozen=True)
class RowIndex:
    """Rows of pieces. A piece is a range of tokens of the cache, in one document.

    Attributes:
        firsts: int64 [rows + 1], the first piece of each row, then the number of pieces.
        starts: int64 [pieces], the first token of each piece.
        lengths: int32 [pieces], tokens in each piece.
        num_cuts: how often a document was cut.
        num_dropped_tokens: how many tokens are in no row.
        waiting: int64 [documents, 2], start and length of those that wait for the rows after these; None if none do.
    """

    firsts: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    num_cuts: int
    num_dropped_tokens: int
    waiting: np.ndarray | None = None

    is_endless: ClassVar[bool] = False

    @property
    def first_pass(self) -> "RowIndex":
        """The rows of the first pass over the documents."""
        return self

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Those that it has, by name."""
        arrays = {"firsts": self.firsts, "starts": self.starts, "lengths": self.lengths}
        return arrays if self.waiting is None else arrays | {"waiting": self.waiting}

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def pieces_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The starts and lengths of the pieces of some rows, and how many pieces each row has."""
        first, counts = self.firsts[rows], self.firsts[rows + 1] - self.firsts[rows]
        pieces = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        return self.starts[pieces], self.lengths[pieces], counts


def open_or_index(folder: Path, made_from: Mapping[str, Any], build: Callable[[], RowIndex]) -> RowIndex:
    """Opens the index that was made from these inputs, and builds it first if there is none.

    Args:
        folder: where indexes are. If it cannot be written, the index stays in memory.
        made_from: everything that determines the index. Plain JSON.

    Raises:
        ConfigError: the disk is full.
    """
    key = json.dumps(made_from, sort_keys=True)
    path = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    if (cached_index := _open(path, key)) is not None:
        return cached_index
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        return build()
    with folder_lock(writable_folder(folder), lambda _: None), disk_full_errors(path):
        if (cached_index := _open(path, key)) is not None:  # another process was faster
            return cached_index
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        built = build()
        with atomic_folder(path) as unfinished:
            _write(unfinished, built, key)
    return _open(path, key) or built


def _write(folder: Path, index: RowIndex, key: str) -> None:
    folder.mkdir()
    for name, array in index.arrays.items():
        with (folder / f"{name}.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
            file.write(array.data)  # numpy's own writer raises an `OSError` without a number on a full disk
    metadata = {
        "made_from": key,
        "num_cuts": index.num_cuts,
        "num_lost": index.num_dropped_tokens,
        "crc32": {name: zlib.crc32(array.data) for name, array in index.arrays.items()},
    }
    (folder / _METADATA).write_text(json.dumps(metadata))


def _open(path: Path, key: str) -> RowIndex | None:
    """None if there is no index, or it is damaged."""
    try:
        metadata = json.loads(read_bytes(path / _METADATA))
        # As plain arrays: slicing a `memmap` is slow.
        arrays = {name: np.asarray(np.load(path / f"{name}.npy", mmap_mode="r")) for name in metadata["crc32"]}
        sums = {name: zlib.crc32(array.data) for name, array in arrays.items()}
        if metadata["made_from"] != key or metadata["crc32"] != sums:
            return None
        return RowIndex(**arrays, num_cuts=metadata["num_cuts"], num_dropped_tokens=metadata["num_lost"])
    # An empty file, and a damaged header, which numpy parses as Python.
    except (OSError, ValueError, KeyError, TypeError, RecursionError, EOFError, SyntaxError, tokenize.TokenError):
        return None
