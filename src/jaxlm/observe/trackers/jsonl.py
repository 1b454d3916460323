"""The tracker that writes the run's files of JSON lines, `metrics.jsonl` and others. It is always on."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.redaction import redact
from jaxlm.core.values.logged import DURATION, RESUMED_FROM, Completion, Histogram, Sample
from jaxlm.engine.checkpoint.lease import LeaseCheck
from jaxlm.observe.log_file import LogFile
from jaxlm.observe.records import (
    COMPLETIONS,
    DECISIONS,
    EARLIER_COMPLETIONS,
    EVENTS,
    HISTOGRAMS,
    SAMPLES,
    drop_after,
    finite,
    unusable,
)


class JsonlTracker:
    """Writes one JSON object per record, `step` first, floats in full precision. NaN and infinity become null.

    Records have an `attempt` after the run went back to an earlier checkpoint. Histograms go to a second file with `name`,
    `low`, `high` and `counts`, samples to a third with `name`, `prompt` and `text`, completions with their rewards to a
    fourth, decisions with the `controller` to a fifth, and other events with their `type` to a sixth. They are created with
    their first record. The first training record of a start that resumes has `throughput/resumed_from`: the step of its
    checkpoint.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume_step: int | None,
        attempt: int = 0,
        warn: Callable[[str], None] = print,
        max_completions_bytes: float = math.inf,
        check_lease: LeaseCheck = lambda: None,
    ):
        """Args:
            resume_step: records of later steps are removed from the files, because the run logs them again; None removes
                all, because the run begins.
            attempt: how often the run had gone back. The records of earlier attempts stay.
            warn: prints a warning, if a file cannot be written or has lines that are not records.
            max_completions_bytes: a larger `completions.jsonl` replaces `completions.1.jsonl`, and a new one begins.

        Raises:
            ConfigError: the files cannot be read and written.
        """
        *simple, completions, earlier = (
            path.with_name(name) for name in (HISTOGRAMS, SAMPLES, DECISIONS, EVENTS, COMPLETIONS, EARLIER_COMPLETIONS)
        )
        place = (attempt, -1 if resume_step is None else resume_step)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # All are read before one is changed: a start that is refused changes none.
            for drop in [drop_after(file, place, warn) for file in (path, *simple, completions, earlier)]:
                drop()
            self._metrics = LogFile(path, warn, check_lease)
            self._metrics.open()
        except OSError as error:
            raise unusable(path, error) from error
        self._files = {file.name: LogFile(file, warn, check_lease) for file in simple}
        self._completions = _RotatedFile(completions, earlier, max_completions_bytes, warn, check_lease)
        self._attempt = attempt
        self._resumed_from = resume_step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        record = self._key(step) | {k: finite(v) for k, v in metrics.items()}
        if self._resumed_from and DURATION in metrics:  # a training step, not an evaluation
            record[RESUMED_FROM] = self._resumed_from
            self._resumed_from = None
        self._metrics.append(json.dumps(record) + "\n")

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._write(self._files[HISTOGRAMS], step, [{"name": name} | vars(one) for name, one in histograms.items()])

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._write(self._files[SAMPLES], step, map(vars, redact(samples)))

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        self._write(self._completions, step, map(vars, redact(completions)))

    def log_decision(self, step: int, controller: str, note: Mapping[str, Any]) -> None:
        """Logs a decision of a controller. Args: step: whose metrics led to it. note: JSON, with an `event`."""
        self._write(self._files[DECISIONS], step, [redact({"controller": controller, **note})])

    def log_event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Logs what has happened after `step` steps. Args: kind, fields: as docs/reference/run-folder.md lists them."""
        self._write(self._files[EVENTS], step, [redact({"type": kind, **fields})])

    def _write(self, file: "LogFile | _RotatedFile", step: int, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            text = json.dumps(self._key(step) | dict(record), ensure_ascii=False)
            numbers = json.loads(text, parse_constant=lambda _: None)  # NaN and infinity are null
            file.append(json.dumps(numbers, ensure_ascii=False) + "\n")
        file.flush(sync=False)

    def begin_attempt(self, attempt: int, step: int, abandoned_steps: int) -> None:
        self._attempt = attempt

    def _key(self, step: int) -> dict[str, Any]:
        return {"step": step, "attempt": self._attempt} if self._attempt else {"step": step}

    def flush(self) -> None:
        for file in (self._metrics, *self._files.values()):
            file.flush()

    def close(self) -> None:
        for file in (self._metrics, *self._files.values(), self._completions):
            file.close()


class _RotatedFile:
    """A log file of limited size: a full one replaces the earlier one."""

    def __init__(
        self, path: Path, earlier: Path, max_bytes: float, warn: Callable[[str], None], check_lease: LeaseCheck
    ):
        self._path, self._earlier, self._max_bytes, self._warn = path, earlier, max_bytes, warn
        self._new_file = lambda: LogFile(path, warn, check_lease)
        self._file = self._new_file()
        self._size = path.stat().st_size if path.exists() else 0

    def append(self, line: str) -> None:
        size = len(line.encode(errors="surrogatepass"))
        if self._size and self._size + size > self._max_bytes:
            self._file.close()
            try:
                os.replace(self._path, self._earlier)
            except OSError as error:
                self._warn(f"warning: {self._path} cannot be renamed ({error.strerror}), so it grows beyond its limit")
            self._file, self._size = self._new_file(), 0
        self._file.append(line)
        self._size += size

    def flush(self, *, sync: bool) -> None:
        self._file.flush(sync=sync)

    def close(self) -> None:
        self._file.close()
