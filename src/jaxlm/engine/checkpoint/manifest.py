"""What a checkpoint says of itself: its name, and where its run stood."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cursor:
    """Where a run stands.

    Attributes:
        step: updates done.
        phase: index of the phase that the state belongs to.
        phase_name: its name.
        entering: whether the phase has just been entered (its number of updates alone would not tell the checkpoint
            from the one at the end of the phase before).
        temporary: whether the next checkpoint replaces this one.
    """

    step: int
    phase: int
    phase_name: str
    entering: bool
    temporary: bool

    @property
    def folder_name(self) -> str:
        """`step-N`, or `step-N-<phase>` on entry of a later phase."""
        return f"step-{self.step}" + (f"-{self.phase_name}" if self.entering and self.phase > 0 else "")

    def to_json(self) -> bytes:
        """As it is saved."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(saved: bytes) -> "Cursor":
        """The cursor that was saved. Raises `ValueError` or `TypeError` where it is none."""
        return Cursor(**json.loads(saved))


def is_temporary(read: Callable[[], bytes]) -> bool:
    """Whether the next checkpoint replaces the one whose cursor this is. What cannot be read is nobody's to delete.

    Args:
        read: gives the saved cursor.
    """
    try:
        return Cursor.from_json(read()).temporary
    except (OSError, ValueError, TypeError):
        return False


UNFINISHED, PENDING, DAMAGED = ".unfinished", ".pending", ".damaged"
"""What a name ends in that is no finished checkpoint's: written or deleted in part, still to be uploaded, set aside."""
_NAME = re.compile(r"step-(\d+)(?:-([\w.]+))?")
_ANOTHER = re.compile(rf"(?:{re.escape(UNFINISHED)}|{re.escape(PENDING)}|{re.escape(DAMAGED)}(?:\.\d+)?)$")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """`step-N`, or `step-N-<phase>` on entry of a later phase; ordered by age.

    Attributes:
        step: updates done.
        entering: whether a phase has just been entered: later than the end of the one before, at the same step.
        text: the whole name.
    """

    step: int
    entering: bool
    text: str

    @staticmethod
    def parse(text: str) -> "CheckpointName | None":
        """The name, or None where a text is none."""
        match = _NAME.fullmatch(text)
        if match is None or _ANOTHER.search(text):
            return None
        return CheckpointName(int(match[1]), match[2] is not None, text)


def find_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints in `folder`, oldest first, by name alone."""
    if not folder.is_dir():
        return []
    names = [CheckpointName.parse(path.name) for path in folder.iterdir() if path.is_dir()]
    return [folder / name.text for name in sorted(name for name in names if name is not None)]


def checkpoints_below(path: Path, *, of_runs: bool = True) -> list[Path]:
    """Finished checkpoints: `path` itself, or those in it; least steps first.

    Args:
        of_runs: whether those in the folders in it are meant, too.
    """
    if (path / "run" / "cursor.json").is_file():
        return [path]
    runs = [path, *(sorted(path.iterdir()) if of_runs and path.is_dir() else [])]
    found = [(CheckpointName.parse(path.name), path) for run in runs for path in find_checkpoints(run)]
    return [path for name, path in sorted((name, path) for name, path in found if name is not None)]
