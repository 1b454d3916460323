"""`metrics.jsonl`, which is always on. Its failure is the run's: it is what the numbers are kept in.

Histograms lie beside it in `histograms.jsonl`.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from jaxlm.core.types import Histogram


class JsonlTracker:
    """One JSON object a record, `step` first, floats in full precision; a number that is not finite is null.

    Histograms have a file of their own, which is there once the first of them is: `name`, `low`, `high` and `counts`.
    """

    def __init__(self, path: Path, *, resume_step: int):
        """Args: resume_step: records of later steps, left by a run that was killed, are dropped: they come again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_after(path, resume_step)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._histograms = path.with_name("histograms.jsonl")
        if self._histograms.exists():
            _drop_after(self._histograms, resume_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one record."""
        record = {"step": step} | {k: _finite(v) for k, v in metrics.items()}
        self._file.write(json.dumps(record) + "\n")

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Appends a record of each to `histograms.jsonl`."""
        with open(self._histograms, "a", encoding="utf-8") as file:
            for name, h in histograms.items():
                ends = {"low": _finite(h.low), "high": _finite(h.high)}
                file.write(json.dumps({"step": step, "name": name, **ends, "counts": h.counts}) + "\n")

    def flush(self) -> None:
        """Hands everything to the operating system and waits for the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flushes and closes the file."""
        self.flush()
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, float]]:
    """All whole records of a metrics file; a last line that was cut off by a kill is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _drop_after(path: Path, step: int) -> None:
    kept = [record for record in read_jsonl(path) if record["step"] <= step]
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
