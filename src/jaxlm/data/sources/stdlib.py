"""The text that every machine has: the source files of the running Python's standard library."""

import functools
import hashlib
import os
import sysconfig
from pathlib import Path

from jaxlm.core.errors import ConfigError

SCHEME = "stdlib:"
TRAIN, VALIDATION = "train", "validation"
_HELD_OUT_OF = 20  # one file in so many is for validation
_NOT_LIBRARY = frozenset(("site-packages", "dist-packages", "__pycache__"))


def library_files(split: str, key: str) -> list[tuple[str, Path]]:
    """Name and path of the files of `train` or `validation`, sorted by name.

    Whole files are held out, by a hash of their name, so that each stays on its side when others come and go. Of
    several files with one content only the first is kept, so none is on both sides. Left out: installed packages, empty
    files, and the few that are not UTF-8 (they are there to test other encodings).

    Args:
        key: where the split is configured, for messages.

    Raises:
        ConfigError: an unknown split, or a Python without source files.
    """
    if split not in (TRAIN, VALIDATION):
        raise ConfigError(f"{key}: '{SCHEME}{split}' given. Allowed: {SCHEME}{TRAIN}, {SCHEME}{VALIDATION}")
    root = Path(sysconfig.get_path("stdlib"))
    names = [name for name in _distinct_files(root) if _is_held_out(name) == (split == VALIDATION)]
    if not names:
        raise ConfigError(f"{key}: this Python has no source files of its standard library in {root}")
    return [(f"{SCHEME}{name}", root / name) for name in names]


@functools.lru_cache(maxsize=1)
def _distinct_files(root: Path) -> tuple[str, ...]:
    first: dict[bytes, str] = {}
    for name in sorted(_python_files(root)):
        content = (root / name).read_bytes()
        if content and _is_utf8(content):
            first.setdefault(hashlib.sha256(content).digest(), name)
    return tuple(first.values())


def _python_files(root: Path) -> list[str]:
    found = []
    for parent, folders, names in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in _NOT_LIBRARY]
        paths = [Path(parent, name) for name in names if name.endswith(".py")]
        found += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return found


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_OF == 0
