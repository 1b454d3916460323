"""Writes what controllers decide: to `decisions.jsonl`, to the trackers, and on the console."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.redaction import redact
from jaxlm.observe.console import Console
from jaxlm.observe.decision_notes import described, numbers
from jaxlm.observe.log_file import LogFile
from jaxlm.observe.records import drop_after, unusable
from jaxlm.observe.trackers import Tracker


class DecisionLog:
    """Logs the decisions of a run's controllers. Only for process 0.

    The file has a JSON object per decision, `step` and `controller` first, and is created with the first one. Decisions have
    an `attempt` after the run went back, like the records of metrics.
    """

    def __init__(
        self, path: Path, trackers: Sequence[Tracker], console: Console, *, resume_step: int, attempt: int = 0
    ):
        """Args:
            resume_step: decisions after later steps are removed from the file, because the run makes them again.
            attempt: how often the run had gone back. The decisions of earlier attempts stay.

        Raises:
            ConfigError: the file cannot be read and written.
        """
        try:
            drop_after(path, (attempt, resume_step), console.log)()
        except OSError as error:
            raise unusable(path, error) from error
        self._file = LogFile(path, console.log)
        self._trackers, self._console, self._attempt = trackers, console, attempt

    def write(self, step: int, controller: str, note: Mapping[str, Any]) -> None:
        """Logs a decision. Args: step: whose metrics led to it. note: JSON, with an `event`."""
        attempt = {"attempt": self._attempt} if self._attempt else {}
        record = {"step": step, **attempt, "controller": controller, **_finite(note)}
        self._file.append(json.dumps(redact(record)) + "\n")
        self._file.flush(sync=False)
        for tracker in self._trackers:
            tracker.log(step, numbers(controller, note))
        self._console.log(f"step {step}: {controller} {described(note)}")

    def begin_attempt(self, attempt: int) -> None:
        """The run went back: decisions from now on belong to this attempt."""
        self._attempt = attempt

    def flush(self) -> None:
        """Blocks until everything logged so far would survive a crash of this process."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    """A JSON value in which NaN and infinity are null."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
