"""What a run runs on: the main script's git repository, and the installed packages."""

import functools
import importlib.metadata
import subprocess
import sys
from pathlib import Path

_TIMEOUT_S = 10


@functools.cache
def repository() -> Path | None:
    """The root of the git repository that the main script lies in; None where it lies in none, or without git."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    folder = Path(script).resolve().parent if script else Path.cwd()
    root = _git(folder, "rev-parse", "--show-toplevel")
    return Path(root) if root else None


def commit() -> str | None:
    """The commit that is checked out, `+ changes` behind it where files differ from it; None without a repository."""
    root = repository()
    name = root and _git(root, "rev-parse", "HEAD")
    if not root or not name:
        return None
    return f"{name} + changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else name


def changes() -> str:
    """How git's files differ from the commit, as a patch; empty where they do not, or without a repository."""
    root = repository()
    patch = root and _git(root, "diff", "HEAD")
    return f"{patch}\n" if patch else ""


def tracked_files(folder: Path) -> frozenset[Path]:
    """The files below a folder that git knows; none where it lies in no repository."""
    names = _git(folder, "ls-files", "-z") or ""
    return frozenset((folder / name).resolve() for name in names.split("\0") if name)


@functools.cache
def packages() -> tuple[str, ...]:
    """Every installed distribution as `name==version`, sorted."""
    found = {f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions()}
    return tuple(sorted(found, key=str.lower))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
