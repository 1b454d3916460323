"""Small arrays that follow from the tokens of a run, on disk: computed once.

<cache_dir>/derived/<digest of the key>.npz    the key, and the arrays by name

The arrays follow from the key, so a file that is damaged is computed again.
"""

import hashlib
import json
import os
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.safe_io import atomic_file, folder_lock, remove_leftovers
from jaxlm.data.base import Log
from jaxlm.data.cache.cache_dir import disk_full_errors, writable_folder

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
