"""Checksums of a checkpoint's files, which detect a damaged checkpoint before it is used."""

import hashlib
import json
import os
import posixpath
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BufferedReader
from pathlib import Path

from jaxlm.core.safe_io import SMALL, UnreadableFileError, fsync, open_regular, read_bytes
from jaxlm.core.stores import BRIEFLY_S, retried

CHECKSUMS = "checksums.json"
SHA256, MD5 = "sha256", "md5"
"""Kinds of checksums: the one that jaxlm computes, and the one that object stores keep for every object."""


class DamagedError(Exception):
    """A checkpoint's files differ from what was saved; the message names the file and the difference."""


def seal(folder: Path) -> None:
    """Writes `checksums.json` for all files below `folder`, and syncs every file to disk.

    A folder with this file is complete.
    """
    names = _files(folder)
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: retried(lambda: _digest(folder / name, sync=True), BRIEFLY_S), names)
        sums = dict(zip(names, digests, strict=True))
    retried(lambda: (folder / CHECKSUMS).write_text(json.dumps(sums, indent=1)), BRIEFLY_S)
    for path in (folder / CHECKSUMS, folder):
        retried(partial(fsync, path), BRIEFLY_S)


def verify(folder: Path, below: str = "") -> None:
    """Reads every file below `folder` and compares it with `checksums.json`. For `below` and errors, see `compare`."""
    compare(lambda: read_bytes(folder / CHECKSUMS, SMALL), _files(folder), lambda n, k: _digest(folder / n, k), below)


def compare(
    read_sums: Callable[[], bytes], existing: Collection[str], digest: Callable[[str, str], str], below: str = ""
) -> None:
    """Compares files with their saved `checksums.json`, which has a SHA-256, or `md5:` and an MD5, for each of them.

    Args:
        read_sums: returns the content of `checksums.json`. Only FileNotFoundError counts as damage; other errors of this and
            of `digest`, such as a store that does not respond, are passed on.
        existing: relative paths of the files that exist.
        digest: returns a file's checksum, given its path and the kind of checksum.
        below: check only files whose relative path starts with this.

    Raises:
        DamagedError: a file is missing, extra or different.
    """
    expected = {name: value for name, value in read_checksums(read_sums).items() if name.startswith(below)}
    existing = {name for name in existing if name.startswith(below)}
    for name in sorted(existing.symmetric_difference(expected)):
        raise DamagedError(f"{name} is {'not part of the checkpoint' if name in existing else 'missing'}")
    digests = {name: _parse_digest(value) for name, value in expected.items()}
    with ThreadPoolExecutor() as pool:
        actuals = pool.map(lambda name: digest(name, digests[name][0]), digests)
        try:
            for (name, (kind, value)), actual in zip(digests.items(), actuals, strict=True):
                if value != actual:
                    raise DamagedError(
                        f"{name} is not what was saved ({kind} {actual[:12]}..., expected {value[:12]}...)"
                    )
        except UnreadableFileError as error:
            raise DamagedError(f"{error.filename}: {error.strerror}") from error


def read_checksums(read: Callable[[], bytes]) -> dict[str, str]:
    """Relative path -> checksum of each file of a checkpoint.

    Args:
        read: see `read_sums` of `compare`.

    Raises:
        DamagedError: there is no `checksums.json`, or it is not one. A path that leaves the checkpoint's folder is refused,
            because files are written to these paths.
    """
    try:
        sums = json.loads(read())
        assert isinstance(sums, dict)
        assert all(isinstance(value, str) for value in sums.values())
    except (FileNotFoundError, ValueError, RecursionError, AssertionError) as error:
        raise DamagedError(f"cannot read {CHECKSUMS} ({error})") from error
    for name in sums:
        if posixpath.isabs(name) or ".." in name.split("/"):
            raise DamagedError(f"{CHECKSUMS} names '{name}', which is outside the checkpoint")
    return sums


def digest_of(file: BufferedReader, kind: str) -> str:
    """The checksum of an open file, in hexadecimal."""
    return hashlib.file_digest(file, partial(hashlib.new, kind, usedforsecurity=False)).hexdigest()


def _parse_digest(value: str) -> tuple[str, str]:
    kind, separator, digest = value.rpartition(":")
    if separator and kind != MD5:
        raise DamagedError(f"{CHECKSUMS} contains checksums of an unknown kind, '{kind}'")
    return (kind or SHA256, digest)


def _files(folder: Path) -> list[str]:
    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error  # `rglob` would pass over what it cannot list

    paths = (Path(path, name) for path, _, files in os.walk(folder, onerror=fail) for name in files)
    names = (path.relative_to(folder).as_posix() for path in paths)
    return sorted(name for name in names if name != CHECKSUMS)


def _digest(path: Path, kind: str = SHA256, *, sync: bool = False) -> str:
    with open_regular(path) as file:
        digest = digest_of(file, kind)
    if sync:
        fsync(path)
    return digest
