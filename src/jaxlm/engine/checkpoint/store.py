"""The interface of checkpoints and folders of checkpoints, on a disk or in a bucket.

    <folder>/step-N            after N steps
    <folder>/step-N-<phase>    after N steps, at the start of <phase> (after its surgery, before its first step)
    <folder>/step-N-attempt-A  after N steps, in a run that has gone back to an earlier checkpoint A times
        state/                 Orbax: every array of the state by its path
        run/                   cursor.json, manifest.json, config.yaml, tokenizer/
        data/position.json     data position
        checksums.json         checksums of all these files

In every kind of folder, a checkpoint is either complete or invisible.
"""

import abc
import errno
import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from jaxlm.engine.checkpoint.lease import LeaseCheck
from jaxlm.engine.checkpoint.manifest import Cursor

ARRAYS = "state"
CURSOR = "run/cursor.json"
_SHOWN = 250  # characters of each end of an error's first line
_NOT_WRITABLE = (errno.ENOTDIR, errno.EACCES, errno.EROFS)


class SaveError(Exception):
    """A checkpoint could not be saved. Finished checkpoints are intact.

    Attributes:
        reason: the message without advice for a run that ends.
        advice: further sentences, each after a space.
    """

    def __init__(self, reason: str, advice: str = ""):
        super().__init__(f"{reason}.{advice}")
        self.reason, self.advice = reason, advice

    @staticmethod
    def because(location: Path | str, text: str) -> "SaveError":
        """The error with its cause, and advice if the disk is full, gone or not writable.

        Args:
            text: message of the cause. TensorStore names the system's error only there, and it can have dozens of lines.
        """
        advice = ""
        if os.strerror(errno.ENOSPC) in text:
            advice = " Finished checkpoints are intact. Free up disk space and run the same command again."
        elif os.strerror(errno.ENOENT) in text:
            advice = " The folder was deleted or is no longer mounted. Run the same command again."
        elif any(os.strerror(number) in text for number in _NOT_WRITABLE):
            advice = " Finished checkpoints are intact. Make the folder writable and run the same command again."
        first_line = text.partition("\n")[0].partition(" [source locations")[0]
        if len(first_line) > 2 * _SHOWN:
            first_line = f"{first_line[:_SHOWN]} ... {first_line[-_SHOWN:]}"
        return SaveError(f"cannot save a checkpoint to {location}: {first_line}", advice)


class Checkpoint(abc.ABC):
    """A finished checkpoint."""

    @property
    @abc.abstractmethod
    def location(self) -> Path | str:
        """Its path or URL."""

    @property
    def name(self) -> str:
        """`step-N` or `step-N-<phase>`."""
        return posixpath.basename(str(self.location))

    @property
    def arrays(self) -> str:
        """Path or URL from which Orbax reads its arrays."""
        return f"{self.location}/{ARRAYS}"

    @abc.abstractmethod
    def read(self, file: str) -> bytes:
        """The content of a small file, by its path in the checkpoint."""

    @abc.abstractmethod
    def verify(self, below: str = "") -> None:
        """Compares its files with the saved checksums. `below` limits this to files whose relative path starts with it.

        Raises:
            DamagedError: a file is missing, extra or different.
        """

    @abc.abstractmethod
    def local(self, below: str) -> AbstractContextManager[Path]:
        """Makes one of its folders (`run`) available on the local disk while the context is open."""

    def cursor(self) -> Cursor:
        """The step and phase at which it was saved."""
        return Cursor.from_json(self.read(CURSOR))


class CheckpointFolder(abc.ABC):
    """A folder of one run's checkpoints.

    All processes must call `open`, `prepare` and `checkpoints`. Only process 0 calls the methods that create, hide and
    delete checkpoints. `str(folder)` is the path or URL as shown to the user.

    Attributes:
        location: its path or URL.
    """

    location: Path | str

    def __str__(self) -> str:
        return str(self.location)

    @abc.abstractmethod
    def open(self, log: Callable[[str], None]) -> None:
        """Checks that the folder can be used, without changing the run's checkpoints.

        For a URL, this may create and delete local copies. Raises `ConfigError` if the folder cannot be used.
        """

    @abc.abstractmethod
    def checkpoints(self) -> Sequence[Checkpoint]:
        """The finished checkpoints, oldest first. Their files are not verified; see `Checkpoint.verify`."""

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Names of all finished checkpoints, oldest first, including those that are not on the local disk."""

    @abc.abstractmethod
    def find(self, name: str) -> Checkpoint:
        """One of the checkpoints listed by `names`, downloaded first if necessary. Process 0 must call this first.

        Raises:
            DamagedError: it was downloaded, and its files are not what was saved.
        """

    @abc.abstractmethod
    def set_aside(self, name: str) -> str:
        """Hides a damaged checkpoint without deleting it, and returns the name under which the user finds it.

        In a bucket, which has no rename, it stays until the run saves a checkpoint of the same name again.
        """

    @abc.abstractmethod
    def abandon(self, name: str) -> str:
        """Hides a checkpoint that the run went back to before, for ever. Returns the name under which the user finds it."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """Creates the folder, checks that it is writable, and finishes or removes what earlier runs left unfinished.

        Raises:
            SaveError: the folder cannot be written to.
            ConfigError: the folder is not the same on all processes, or its store does not respond.
        """

    @abc.abstractmethod
    def check_free(self) -> None:
        """Raises `ConfigError` if it is known at once that another start of the run holds the folder. Writes nothing."""

    @abc.abstractmethod
    def locked(self, log: Callable[[str], None]) -> AbstractContextManager[LeaseCheck]:
        """Keeps a second start of the same run away while the context is open. Its value is called before each save.

        Raises:
            ConfigError: another start of the run holds the folder.
        """

    @abc.abstractmethod
    def begin(self, name: str, files: Mapping[str, bytes]) -> None:
        """Starts a checkpoint by writing its small files. Args: files: relative path -> content."""

    @abc.abstractmethod
    def arrays(self, name: str) -> str:
        """Path or URL to which every process writes its arrays of a checkpoint started with `begin`."""

    @abc.abstractmethod
    def commit(self, name: str) -> None:
        """Makes a completely written checkpoint visible, and calls `tidy`, whose failure does not matter."""

    @abc.abstractmethod
    def tidy(self) -> None:
        """Deletes what failed saves have left behind, and the temporary checkpoints that the last committed one replaces.

        Those that its cursor pins stay. No save may be in progress.
        """
