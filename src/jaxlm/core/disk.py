"""The local disk: waiting for it, and telling its failures from those of a store far away."""

import errno
import os
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The disk, or what this user may have of it, is full."""


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_local_failure(error: BaseException, folder: Path) -> bool:
    """Whether what failed, while something was copied to or from a store, is the local disk.

    Args:
        folder: the local side of the copy.
    """
    if not isinstance(error, OSError):
        return False
    if error.errno in FULL:
        return True  # writing says no file name; stores speak of their own space in other words
    return error.filename is not None and Path(error.filename).absolute().is_relative_to(folder.absolute())
