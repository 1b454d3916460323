"""Folders that a command writes as a whole, on a disk or at a URL: complete or absent."""

import contextlib
import glob
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import from_main
from jaxlm.core.safe_io import fsync
from jaxlm.core.stores import inaccessible, is_url, names_below, open_store, put_folder, storage_errors

Location = Path | str
"""A path, or a URL as a string."""


_UNFINISHED = ".unfinished"


class PublishError(Exception):
    """A folder could not be written or uploaded."""


def check_unused(folder: Location, last: str) -> None:
    """Raises `ConfigError` if `is_taken(folder, last)`. Every process must call this before any of them writes."""
    if is_taken(folder, last):
        raise ConfigError(f"{folder} already exists. Choose another folder, or move the existing one away")


def check_folder_writable(folder: Path) -> None:
    """Makes and deletes a folder where `folder` will be. Raises `PublishError` if that fails, as `publish_folder` would."""
    nearest = next(parent for parent in folder.absolute().parents if parent.exists())
    try:
        Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=nearest)).rmdir()
    except OSError as error:
        raise PublishError(
            f"cannot write {folder} (no folder can be made in {nearest}: {error.strerror}). Choose a writable folder"
        ) from error


def is_taken(folder: Location, last: str) -> bool:
    """Tells whether `folder` exists on process 0 and is not an empty folder. Every process gets the same answer.

    Args:
        last: the file that makes a folder at a URL complete. Without it, the folder is the rest of an interrupted upload.
    """
    return from_main(lambda: is_complete(folder, last))


@contextlib.contextmanager
def publish_folder(folder: Location, last: str) -> Iterator[Path]:
    """Yields a temporary folder to write to. When the block ends, it is synced to disk and renamed to `folder`, or uploaded
    to it. Only process 0 may call this.

    Args:
        last: the file that is uploaded last.

    Raises:
        PublishError: the folder cannot be written, also by the block, or the upload failed.
    """
    try:
        with _unfinished(folder, last) as unfinished:
            yield unfinished
    except OSError as error:
        raise PublishError(
            f"cannot write {folder} ({error}). Free up disk space, or choose a writable folder"
        ) from error


@contextlib.contextmanager
def _unfinished(folder: Location, last: str) -> Iterator[Path]:
    if isinstance(folder, str):
        with tempfile.TemporaryDirectory(prefix="jaxlm-") as unfinished:
            yield Path(unfinished)
            _upload(Path(unfinished), folder, last)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    unfinished = folder.with_name(f"{_prefix(folder)}{os.getpid()}{_UNFINISHED}")
    unfinished.mkdir()
    try:
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            fsync(path)
        os.replace(unfinished, folder)  # replaces an empty folder
        fsync(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _prefix(folder: Path) -> str:
    return f".{folder.name}.{platform.node()}-"


def _remove_leftovers(folder: Path) -> None:
    """Deletes what killed processes of this host have left of `folder`, of one with this process's number too: in a
    container, every start may have the same. Other hosts that share the disk may be writing.
    """
    prefix = _prefix(folder)
    for leftover in folder.parent.glob(f"{glob.escape(prefix)}*{_UNFINISHED}"):
        number = leftover.name.removeprefix(prefix).removesuffix(_UNFINISHED)
        if number.isdecimal() and not _is_of_another(int(number)):
            shutil.rmtree(leftover, ignore_errors=True)  # another start may delete it too


def _is_of_another(number: int) -> bool:
    """Tells whether another process with this number runs."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it belongs to another user
    return number != os.getpid()


def location_of(path: str) -> Location:
    """A path in the local file system as a `Path`; a URL as it is, without a slash at the end."""
    return path.rstrip("/") if is_url(path) else Path(path)


def child_of(folder: Location, name: str) -> Location:
    """The location of a file or folder in a folder."""
    return f"{folder}/{name}" if isinstance(folder, str) else folder / name


def names_in(folder: Location) -> list[str]:
    """The names of what is in a folder; none if it does not exist."""
    if isinstance(folder, Path):
        return [path.name for path in folder.iterdir()] if folder.is_dir() else []
    fs, root = open_store(folder, str(folder))
    with storage_errors(inaccessible(f"'{folder}' cannot be read")):
        return names_below(fs, root)


def is_complete(folder: Location, last: str) -> bool:
    """Like `is_taken`, for one process."""
    if isinstance(folder, Path):
        return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    fs, root = open_store(folder, str(folder))
    with storage_errors(inaccessible(f"'{folder}' cannot be read")):
        return bool(fs.exists(f"{root}/{last}"))


def _upload(local: Path, url: str, last: str) -> None:
    fs, root = open_store(url, url)
    with storage_errors(lambda reason: PublishError(f"cannot upload to {url} ({reason})"), local=local):
        put_folder(fs, local, root, last)
