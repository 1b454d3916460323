"""Keeps a second start of a run away from a folder: on a disk with a locked file, in a store with a lease."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import NoLocksError, lock, open_regular
from jaxlm.engine.checkpoint.holder import Holder, StillHeld, held_by
from jaxlm.engine.checkpoint.lease import Lease

_MAX_HOLDER = 10_000  # bytes of the name of a process
# A dry run that looks whether a run is being trained locks its file for a moment, and the name of a process is in the file a
# moment after it has locked it.
_TRIES, _AGAIN_S = 10, 0.1


@contextlib.contextmanager
def locked_file(
    path: Path,
    what: str,
    unwritable: Callable[[OSError], ConfigError],
    refusal: Callable[[object, str], ConfigError] = held_by,
) -> Iterator[StillHeld]:
    """Locks a file, which is created if it is missing. The kernel releases it when the process ends, however it ends.

    If the file system has no locks, as some network file systems, a lease in a folder beside the file takes its place.

    Args:
        what: as of `held_by`.
        unwritable: the error if the file cannot be created.
        refusal: the error if another process has locked it.
    """
    with contextlib.ExitStack() as closing:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = closing.enter_context(open(path, "a+b"))
            still_held = lambda: None  # noqa: E731 - nobody else can take a lock
            try:
                holder = _lock(file)
            except NoLocksError:
                lease = path.absolute().with_name(f"{path.name}.lease")
                lease.mkdir(exist_ok=True)
                holding = Lease(str(lease), _say, lambda holder: refusal(holder, what)).held()
                holder, still_held = None, closing.enter_context(holding)
            if holder is not None:
                raise refusal(holder, what)
            file.truncate(0)
            file.write(str(Holder.this_process()).encode())
            file.flush()
        except OSError as error:
            raise unwritable(error) from error
        try:
            yield still_held
        finally:
            with contextlib.suppress(OSError):  # the disk is gone, and its locks with it
                file.truncate(0)  # nobody holds it


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # the log is not open yet


def _lock(file: IO[bytes], *, shared: bool = False) -> str | None:
    """Locks a file. Returns None, or who has locked it already."""
    for attempt in range(_TRIES):
        try:
            lock(file, shared=shared)
            return None
        except BlockingIOError:
            file.seek(0)
            if attempt and (holder := file.read(_MAX_HOLDER).decode(errors="replace").strip()):
                return holder
        time.sleep(_AGAIN_S)
    return "by another process"


def check_unlocked(path: Path, what: str) -> None:
    """Raises `ConfigError` if another process has locked a file, or if it is unknown. Args: what: as of `held_by`."""
    # Without locks there may be a lease, but whether its holder is alive takes half a minute to see.
    with contextlib.suppress(FileNotFoundError, NoLocksError), open_regular(path) as file:
        if (holder := _lock(file, shared=True)) is not None:
            raise held_by(holder, what)
