"""The environment of a run: the main script's git repository, and the installed packages."""

import functools
import importlib.metadata
import subprocess
import sys
from pathlib import Path

_TIMEOUT_S = 10


@functools.cache
def repository() -> Path | None:
    """The root of the git repository that contains the main script; None without a repository or without git."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    folder = Path(script).resolve().parent if script else Path.cwd()
    root = _git(folder, "rev-parse", "--show-toplevel")
    return Path(root) if root else None


def commit() -> str | None:
    """The checked-out commit, followed by `+ changes` if tracked files differ from it; None without a repository."""
    root = repository()
    name = root and _git(root, "rev-parse", "HEAD")
    if not root or not name:
        return None
    return f"{name} + changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else name


def changes() -> str:
    """Uncommitted changes of tracked files, as a patch; empty without changes or without a repository."""
    root = repository()
    patch = root and _git(root, "diff", "HEAD")
    return f"{patch}\n" if patch else ""


def tracked_files(folder: Path) -> frozenset[Path]:
    """The files below a folder that git tracks; empty without a repository."""
    names = _git(folder, "ls-files", "-z") or ""
    return frozenset((folder / name).resolve() for name in names.split("\0") if name)


@functools.cache
def packages() -> tuple[str, ...]:
    """Every installed distribution as `name==version`, sorted."""
    names = {f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions()}
    return tuple(sorted(names, key=str.lower))


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
