"""The tracker that writes `metrics.jsonl`, and histograms to `histograms.jsonl`.

It is always on, and it is the primary record of the metrics, so its failure stops the run.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.core.types import Histogram


class JsonlTracker:
    """Writes one JSON object per record, `step` first, floats in full precision. NaN and infinity become null.

    Records have an `attempt` after the run went back to an earlier checkpoint. Histograms go to a second file with `name`,
    `low`, `high` and `counts`, which is created with the first histogram.
    """

    def __init__(self, path: Path, *, resume_step: int, attempt: int = 0):
        """Args:
        resume_step: records of later steps are removed from the file, because the run logs them again.
        attempt: how often the run had gone back. The records of earlier attempts stay.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_after(path, (attempt, resume_step))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._histograms = path.with_name("histograms.jsonl")
        if self._histograms.exists():
            _drop_after(self._histograms, (attempt, resume_step))
        self._attempt = attempt

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        record = self._key(step) | {k: _finite(v) for k, v in metrics.items()}
        self._file.write(json.dumps(record) + "\n")

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        with open(self._histograms, "a", encoding="utf-8") as file:
            for name, h in histograms.items():
                ends = {"low": _finite(h.low), "high": _finite(h.high)}
                file.write(json.dumps(self._key(step) | {"name": name, **ends, "counts": h.counts}) + "\n")

    def begin_attempt(self, attempt: int, step: int, abandoned_steps: int) -> None:
        self._attempt = attempt

    def _key(self, step: int) -> dict[str, Any]:
        return {"step": step, "attempt": self._attempt} if self._attempt else {"step": step}

    def flush(self) -> None:
        """Flushes and syncs the file to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, float]]:
    """The complete records of a metrics file, without those that a later attempt of the run supersedes.

    A last line that was cut off when the process was killed is ignored.
    """
    records = _read_all(path)
    first_steps: dict[float, float] = {}
    for record in records:
        first_steps.setdefault(record.get("attempt", 0), record["step"])
    ends = {
        one: min((step for other, step in first_steps.items() if other > one), default=math.inf) for one in first_steps
    }
    return [record for record in records if record["step"] < ends[record.get("attempt", 0)]]


def _read_all(path: Path) -> list[dict[str, float]]:
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _drop_after(path: Path, place: tuple[int, int]) -> None:
    """Removes the records after an attempt and step, and those of later attempts."""
    attempt, step = place

    def stays(record: Mapping[str, float]) -> bool:
        number = record.get("attempt", 0)
        return number < attempt or (number == attempt and record["step"] <= step)

    records = list(filter(stays, _read_all(path)))
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
