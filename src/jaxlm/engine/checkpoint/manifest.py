"""Checkpoint names, and the cursor: the step and phase at which a checkpoint was saved."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cursor:
    """The position of a run.

    Attributes:
        step: steps done.
        phase: index of the phase that the state belongs to.
        phase_name: name of that phase.
        entering: whether the phase has just been entered. The checkpoint at the end of the previous phase has the same step.
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
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(saved: bytes) -> "Cursor":
        """Parses a saved cursor. Raises `ValueError` or `TypeError` if it is malformed."""
        return Cursor(**json.loads(saved))


def is_temporary(read: Callable[[], bytes]) -> bool:
    """Whether a checkpoint is temporary. False if `read` cannot return its saved cursor, so that it is never deleted."""
    try:
        return Cursor.from_json(read()).temporary
    except (OSError, ValueError, TypeError):
        return False


UNFINISHED, PENDING, DAMAGED = ".unfinished", ".pending", ".damaged"
"""Suffixes of names that are not finished checkpoints: partly written or deleted, not yet uploaded, set aside."""
_NAME = re.compile(r"step-(\d+)(?:-([\w.]+))?")
_RESERVED_SUFFIX = re.compile(rf"(?:{re.escape(UNFINISHED)}|{re.escape(PENDING)}|{re.escape(DAMAGED)}(?:\.\d+)?)$")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """`step-N`, or `step-N-<phase>` on entry of a later phase; ordered by age.

    Attributes:
        step: steps done.
        entering: whether a phase has just been entered, which comes after the end of the previous phase at the same step.
        text: the full name.
    """

    step: int
    entering: bool
    text: str

    @staticmethod
    def parse(text: str) -> "CheckpointName | None":
        """Parses a name; None if `text` is not the name of a finished checkpoint."""
        match = _NAME.fullmatch(text)
        if match is None or _RESERVED_SUFFIX.search(text):
            return None
        return CheckpointName(int(match[1]), match[2] is not None, text)


def find_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints in `folder`, oldest first, recognized by their names only."""
    if not folder.is_dir():
        return []
    names = (CheckpointName.parse(path.name) for path in folder.iterdir() if path.is_dir())
    return [folder / name.text for name in sorted(filter(None, names))]


def checkpoints_below(path: Path, *, of_runs: bool = True) -> list[Path]:
    """Finished checkpoints: `path` itself, or those in it and, with `of_runs`, in its subfolders; fewest steps first."""
    if (path / "run" / "cursor.json").is_file():
        return [path]
    runs = [path, *(sorted(path.iterdir()) if of_runs and path.is_dir() else [])]
    by_name = [(CheckpointName.parse(path.name), path) for run in runs for path in find_checkpoints(run)]
    return [path for name, path in sorted((name, path) for name, path in by_name if name is not None)]
