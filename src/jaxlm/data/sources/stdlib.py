"""A corpus available on every machine: the source files of Python's standard library."""

import functools
import hashlib
import os
import sysconfig
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.data.base import TRAIN, VALIDATION

SCHEME = "stdlib:"
_VALIDATION_EVERY = 20  # about one file in 20 is held out for validation
_NOT_LIBRARY = frozenset(("site-packages", "dist-packages", "__pycache__"))


def library_files(split: str, key: str) -> list[tuple[str, Path]]:
    """Names and paths of the files of `train` or `validation`, sorted by name.

    The split is by a hash of the file's name, so a file stays in its split when other files come and go. Of files with equal
    content only the first is used, so no content is in both splits. Installed packages, empty files, and the few files that
    are not UTF-8 (they test other encodings) are left out.

    Args:
        key: config path of the URL, for messages.

    Raises:
        ConfigError: unknown split, or this Python has no source files.
    """
    if split not in (TRAIN, VALIDATION):
        raise ConfigError(f"{key}: '{SCHEME}{split}' given. Allowed: {SCHEME}{TRAIN}, {SCHEME}{VALIDATION}")
    root = Path(sysconfig.get_path("stdlib"))
    names = [name for name in _distinct_files(root) if _is_held_out(name) == (split == VALIDATION)]
    if not names:
        raise ConfigError(f"{key}: no source files of Python's standard library in {root}. Use other training text")
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
    python_files: list[str] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in _NOT_LIBRARY]
        paths = [Path(parent, name) for name in names if name.endswith(".py")]
        python_files += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return python_files


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % _VALIDATION_EVERY == 0
