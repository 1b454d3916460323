"""Checksums of a checkpoint's files, so that a damaged one is noticed before it is used."""

import hashlib
import json
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BufferedReader
from pathlib import Path

from jaxlm.core.atomic_io import fsync

CHECKSUMS = "checksums.json"
SHA256, MD5 = "sha256", "md5"
"""Kinds of checksums: our own, and the one that object stores keep of every object."""


class DamagedError(Exception):
    """A checkpoint's files are not the ones that were saved; the text says which and how."""


def seal(folder: Path) -> None:
    """Writes `checksums.json` over all files below `folder`, and makes sure that everything is on the disk.

    A folder with this file is whole; hashing reads each file once, from memory most likely.
    """
    names = _files(folder)
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(lambda name: _digest_on_disk(folder / name), names))
    sums = dict(zip(names, digests, strict=True))
    (folder / CHECKSUMS).write_text(json.dumps(sums, indent=1))
    for path in (folder / CHECKSUMS, folder):
        fsync(path)


def verify(folder: Path, below: str = "") -> None:
    """Reads every file below `folder` and compares it with `checksums.json`.

    Args:
        below: looks only at files whose relative path begins so.

    Raises:
        DamagedError: a file is missing, extra, of another length or of other content.
    """
    compare(lambda: (folder / CHECKSUMS).read_bytes(), _files(folder), lambda n, k: _digest(folder / n, k), below)


def compare(
    read_sums: Callable[[], bytes], found: Collection[str], digest: Callable[[str, str], str], below: str = ""
) -> None:
    """Compares files, wherever they are, with the `checksums.json` that was saved over them.

    A value there is the SHA-256, or `md5:` and that, both in hexadecimal.

    Args:
        read_sums: the content of `checksums.json`. Only that there is none is damage; what else it raises, and `digest`
            does, is another matter: a store that does not answer, a disk that is not there.
        found: the relative paths of the files that are there.
        digest: that of a file, by its path and the kind of checksum.
        below: looks only at files whose relative path begins so.

    Raises:
        DamagedError: see `verify`.
    """
    try:
        expected: dict[str, str] = json.loads(read_sums())
        assert isinstance(expected, dict)
        assert all(isinstance(value, str) for value in expected.values())
    except (FileNotFoundError, ValueError, AssertionError) as error:
        raise DamagedError(f"{CHECKSUMS} cannot be read ({error})") from error
    expected = {name: value for name, value in expected.items() if name.startswith(below)}
    found = {name for name in found if name.startswith(below)}
    for name in sorted(found.symmetric_difference(expected)):
        raise DamagedError(f"{name} is {'not part of it' if name in found else 'missing'}")
    wanted = {name: _parsed(value) for name, value in expected.items()}
    with ThreadPoolExecutor() as pool:
        actuals = pool.map(lambda name: digest(name, wanted[name][0]), wanted)
        for (name, (kind, value)), actual in zip(wanted.items(), actuals, strict=True):
            if value != actual:
                raise DamagedError(f"{name} is not what was saved ({kind} {actual[:12]}..., expected {value[:12]}...)")


def digest_of(file: BufferedReader, kind: str) -> str:
    """The checksum of an open file, in hexadecimal."""
    return hashlib.file_digest(file, partial(hashlib.new, kind, usedforsecurity=False)).hexdigest()


def _parsed(value: str) -> tuple[str, str]:
    kind, separator, digest = value.rpartition(":")
    if separator and kind != MD5:
        raise DamagedError(f"{CHECKSUMS} has checksums of an unknown kind, '{kind}'")
    return (kind or SHA256, digest)


def _files(folder: Path) -> list[str]:
    found = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in found if name != CHECKSUMS)


def _digest(path: Path, kind: str = SHA256) -> str:
    with open(path, "rb") as file:
        return digest_of(file, kind)


def _digest_on_disk(path: Path) -> str:
    digest = _digest(path)
    fsync(path)
    return digest
