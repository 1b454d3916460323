"""Keeps a second start of a run away from a folder: on a disk with a locked file, in a store with a lease."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.engine.checkpoint.holder import Holder

StillHeld = Callable[[], None]
"""Raises `LeaseLostError` if another start of the run has taken the folder."""


class LeaseLostError(Exception):
    """Another start of the run has taken its folder, because this process did not answer for too long."""


def held_by(holder: object, what: str, work: str = "run", key: str = "trainer.id") -> ConfigError:
    """The error of a start that finds the same work going on.

    Args:
        what: both would do, such as `save to PATH`.
        work: what is trained.
        key: another value of it keeps both apart.
    """
    return ConfigError(
        f"this {work} is already being trained ({holder}): both would {what}. Wait until it ends, stop it, or set another"
        f" {key}"
    )


@contextlib.contextmanager
def locked_file(path: Path, what: str, work: str = "run", key: str = "trainer.id") -> Iterator[StillHeld]:
    """Locks a file, which is created if it is missing. The kernel releases it when the process ends, however it ends.

    Args:
        what, work, key: as of `held_by`.

    Raises:
        ConfigError: another process has locked it.
        OSError: the file cannot be created.
    """
    import fcntl  # not on Windows

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise held_by(file.read().strip() or "by another process", what, work, key) from error
        except OSError:
            pass  # this file system has no locks
        file.truncate(0)
        file.write(str(Holder.this_process()))
        file.flush()
        yield lambda: None
