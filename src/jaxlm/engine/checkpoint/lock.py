"""Keeps a second start of a run away from a folder: on a disk with a locked file, in a store with a lease."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from jaxlm.core.bounded_read import open_regular
from jaxlm.core.errors import ConfigError
from jaxlm.engine.checkpoint.holder import Holder

StillHeld = Callable[[], None]
"""Raises `LeaseLostError` if another start of the run has taken the folder."""

_MAX_HOLDER = 10_000  # bytes of the name of a process
# A dry run that looks whether a run is being trained locks its file for a moment, and the name of a process is in the file a
# moment after it has locked it.
_TRIES, _AGAIN_S = 10, 0.1


class LeaseLostError(Exception):
    """Another start of the run has taken its folder, because this process did not answer for too long."""


def held_by(holder: object, what: str) -> ConfigError:
    """The error of a start that finds a run at work. Args: what: both would do, such as `save to PATH`."""
    return ConfigError(
        f"this run is already being trained ({holder}): both would {what}. Wait until it ends, stop it, or set another"
        " trainer.id"
    )


@contextlib.contextmanager
def locked_file(path: Path, what: str, refusal: Callable[[object, str], ConfigError] = held_by) -> Iterator[StillHeld]:
    """Locks a file, which is created if it is missing. The kernel releases it when the process ends, however it ends.

    If the file system has no locks, as some network file systems, a lease in a folder beside the file takes its place.

    Args:
        what: as of `held_by`.
        refusal: the error if another process has locked it.

    Raises:
        ConfigError: the refusal.
        OSError: the file cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    still_held, holder = (lambda: None), None
    with open(path, "a+", encoding="utf-8") as file, contextlib.ExitStack() as closing:
        try:
            holder = _lock(file)
        except OSError:
            still_held = closing.enter_context(_leased(path, what, refusal))
        if holder is not None:
            raise refusal(holder, what)
        file.truncate(0)
        file.write(str(Holder.this_process()))
        file.flush()
        try:
            yield still_held
        finally:
            file.truncate(0)  # nobody holds it


def _leased(
    path: Path, what: str, refusal: Callable[[object, str], ConfigError]
) -> contextlib.AbstractContextManager[StillHeld]:
    from jaxlm.engine.checkpoint.lease import Lease  # it needs this module

    folder = path.absolute().with_name(f"{path.name}.lease")
    folder.mkdir(exist_ok=True)
    log = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731 - before the log is open
    return Lease(str(folder), log, lambda holder: refusal(holder, what)).held()


def _lock(file: TextIO) -> str | None:
    """Locks a file. Returns None, or who has locked it already."""
    import fcntl  # not on Windows

    for attempt in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            file.seek(0)
            if attempt and (holder := file.read(_MAX_HOLDER).strip()):
                return holder
        time.sleep(_AGAIN_S)
    return "by another process"


def check_unlocked(path: Path, what: str) -> None:
    """Raises `ConfigError` if another process has locked a file. Args: what: as of `held_by`."""
    import fcntl

    with contextlib.suppress(OSError), open_regular(path) as file:  # no file, or no locks: the holder is unknown
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise held_by(
                file.read(_MAX_HOLDER).decode(errors="replace").strip() or "by another process", what
            ) from error
