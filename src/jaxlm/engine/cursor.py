"""Where a run stands, as a checkpoint says it."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass


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
