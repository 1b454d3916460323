"""Writes what controllers decide: to `decisions.jsonl`, to the trackers, and on the console."""

import json
from collections.abc import Mapping, Sequence
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
        self, file: LogFile, trackers: Sequence[Tracker], console: Console, *, resume_step: int, attempt: int = 0
    ):
        """Args:
            resume_step: decisions after later steps are removed from the file, because the run makes them again.
            attempt: how often the run had gone back. The decisions of earlier attempts stay.

        Raises:
            ConfigError: the file cannot be read and written.
        """
        try:
            drop_after(file.path, (attempt, resume_step), console.log)()
        except OSError as error:
            raise unusable(file.path, error) from error
        self._file = file
        self._trackers, self._console, self._attempt = trackers, console, attempt

    def write(self, step: int, controller: str, note: Mapping[str, Any]) -> None:
        """Logs a decision. Args: step: whose metrics led to it. note: JSON, with an `event`."""
        attempt = {"attempt": self._attempt} if self._attempt else {}
        record = {"step": step, **attempt, "controller": controller, **note}
        finite = json.loads(json.dumps(redact(record)), parse_constant=lambda _: None)  # NaN and infinity are null
        self._file.append(json.dumps(finite) + "\n")
        self._file.flush(sync=False)
        for tracker in self._trackers:
            tracker.log(step, numbers(controller, note))
        self._console.log(f"step {step}: {controller} {described(note)}")

    def begin_attempt(self, attempt: int) -> None:
        """The run went back: decisions from now on belong to this attempt."""
        self._attempt = attempt

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
