"""Where checkpoints lie: what the engine asks of a folder of them, on a disk or in a bucket.

    <folder>/step-N            N updates done
    <folder>/step-N-<phase>    N updates done and <phase> entered (its surgery done, nothing of it trained)
        state/                 Orbax: every array of the state by its path
        run/                   cursor.json, manifest.json, config.yaml, tokenizer/
        data/position.json     where the data goes on
        checksums.json         of all of these

Whatever the folder is, a checkpoint in it is complete or invisible.
"""

import abc
import errno
import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from jaxlm.engine.checkpoint.manifest import Cursor

ARRAYS = "state"
CURSOR = "run/cursor.json"


class SaveError(Exception):
    """A checkpoint could not be saved. Finished checkpoints are untouched."""

    @classmethod
    def because(cls, place: Path | str, error: BaseException) -> "SaveError":
        """With what to do, where the cause tells it. TensorStore names the system's error only in its text."""
        full = os.strerror(errno.ENOSPC) in str(error)
        advice = " The finished checkpoints are whole: make room, and start the same command again." if full else ""
        return cls(f"saving a checkpoint to {place} failed: {error}.{advice}")


class Checkpoint(abc.ABC):
    """A finished checkpoint."""

    @property
    @abc.abstractmethod
    def place(self) -> Path | str:
        """Where it lies, as a person names it: a path, or a URL."""

    @property
    def name(self) -> str:
        """`step-N` or `step-N-<phase>`."""
        return posixpath.basename(str(self.place))

    @property
    def arrays(self) -> str:
        """Where Orbax reads its arrays."""
        return f"{self.place}/{ARRAYS}"

    @abc.abstractmethod
    def read(self, file: str) -> bytes:
        """The content of one of its small files. Args: file: by its path in the checkpoint."""

    @abc.abstractmethod
    def verify(self, below: str = "") -> None:
        """Compares its files with what was saved.

        Args:
            below: looks only at files whose relative path begins so.

        Raises:
            DamagedError: a file is missing, extra, of another length or of other content.
        """

    @abc.abstractmethod
    def local(self, below: str) -> AbstractContextManager[Path]:
        """One of its folders (`run`) on the local disk, for as long as the context is open."""

    def cursor(self) -> Cursor:
        """Where its run stood."""
        return Cursor.from_json(self.read(CURSOR))


class CheckpointFolder(abc.ABC):
    """A folder of one run's checkpoints.

    `open`, `prepare` and `checkpoints` are called by every process; what makes, hides and deletes checkpoints, by process
    0 alone. Its text is the place, and what a person should know beside.
    """

    @property
    @abc.abstractmethod
    def place(self) -> Path | str:
        """Where it lies, as a person names it: a path, or a URL."""

    @property
    @abc.abstractmethod
    def write_errors(self) -> tuple[type[Exception], ...]:
        """What Orbax raises where arrays cannot be written there."""

    @abc.abstractmethod
    def __str__(self) -> str: ...

    @abc.abstractmethod
    def open(self, log: Callable[[str], None]) -> None:
        """Makes sure of what must hold before anything trains, and can be known without changing a run's checkpoints.

        Local copies of what lies behind a URL may be made and deleted.

        Raises:
            ConfigError: the folder cannot be used.
        """

    @abc.abstractmethod
    def checkpoints(self) -> Sequence[Checkpoint]:
        """The finished ones, oldest first; whether their files are still what was saved, `Checkpoint.verify` says."""

    @abc.abstractmethod
    def set_aside(self, name: str) -> str:
        """Makes a damaged checkpoint invisible, deletes nothing, and says by what name a person finds it.

        In a bucket, which cannot rename, it lies there until the run saves a checkpoint of that name again.
        """

    @abc.abstractmethod
    def prepare(self) -> None:
        """Makes the folder, shows that it can be written, and finishes or removes what earlier runs left unfinished.

        Raises:
            SaveError: the folder cannot be written to.
            ConfigError: it is not the same for all processes, or the store behind it does not answer.
        """

    @abc.abstractmethod
    def begin(self, name: str, files: Mapping[str, bytes]) -> None:
        """Begins a checkpoint with its small files. Args: files: relative path -> content."""

    @abc.abstractmethod
    def arrays(self, name: str) -> str:
        """Where every process writes the arrays of a checkpoint that was begun."""

    @abc.abstractmethod
    def commit(self, name: str) -> None:
        """Makes a checkpoint visible whose files are all written, and deletes those that it replaces."""
