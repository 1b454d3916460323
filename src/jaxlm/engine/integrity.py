"""Checksums of a folder's files, so that a damaged checkpoint is noticed before it is used."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxlm.core.disk import sync

CHECKSUMS = "checksums.json"


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
        sync(path)


def verify(folder: Path, below: str = "") -> None:
    """Reads every file below `folder` and compares it with `checksums.json`.

    Args:
        below: looks only at files whose relative path begins so.

    Raises:
        DamagedError: a file is missing, extra, of another length or of other content.
    """
    try:
        expected: dict[str, str] = json.loads((folder / CHECKSUMS).read_text())
        assert isinstance(expected, dict)
    except (OSError, ValueError, AssertionError) as error:
        raise DamagedError(f"{CHECKSUMS} cannot be read ({error})") from error
    expected = {name: digest for name, digest in expected.items() if name.startswith(below)}
    found = {name for name in _files(folder) if name.startswith(below)}
    for name in sorted(found.symmetric_difference(expected)):
        raise DamagedError(f"{name} is {'not part of it' if name in found else 'missing'}")
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: _digest(folder / name), expected)
        for (name, digest), actual in zip(expected.items(), digests, strict=True):
            if digest != actual:
                raise DamagedError(f"{name} is not what was saved (sha256 {actual[:12]}..., expected {digest[:12]}...)")


def _files(folder: Path) -> list[str]:
    found = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in found if name != CHECKSUMS)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_on_disk(path: Path) -> str:
    digest = _digest(path)
    sync(path)
    return digest
