"""Waiting for the disk."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
