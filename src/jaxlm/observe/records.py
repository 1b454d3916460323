"""The files in a run's log folder, and the records in those of JSON lines. They may be damaged or half written."""

import errno
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from jaxlm.core.errors import ConfigError
from jaxlm.core.redaction import redact
from jaxlm.core.safe_io import free_path, open_regular, read_bytes

METRICS = "metrics.jsonl"
HISTOGRAMS = "histograms.jsonl"
SAMPLES = "samples.jsonl"
COMPLETIONS = "completions.jsonl"
EARLIER_COMPLETIONS = "completions.1.jsonl"
DECISIONS = "decisions.jsonl"
EVENTS = "events.jsonl"
LEDGER = "goodput.jsonl"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
TRAIN_LOG = "train.log"
REPORT_PAGE = "report.html"

_REWRITTEN = (METRICS, HISTOGRAMS, SAMPLES, COMPLETIONS, EARLIER_COMPLETIONS, DECISIONS, EVENTS, CONFIG, ENVIRONMENT)
_SCORES = {"reward": float, "advantage": float}
# Forms of records by their file, or by their `type` in `events.jsonl`. Numbers may be null.
_FORMS: Mapping[str, Any] = {
    SAMPLES: {"name": str, "prompt": str, "text": str},
    COMPLETIONS: {"name": str, "prompt": str, "completion": str, "rewards": {str: float}, **_SCORES},
    DECISIONS: {"controller": str, "event": str},
    "start": {"rows": [(str, str)]},
    "phase": {"name": str, "start": int, "end": int, "num_phases": int, "rows": [(str, str)]},
    "stored": {"phase": str, "count": int, "megabytes": float, "folder": str},
    "skip": {"reason": str, "batch": str},
    "layers": {"source": str, "title": str, "columns": [str], "rows": [[float]]},
}
_MAX_STEP = 2**53
_MAX_METRIC = 1e100  # products of two such numbers are finite


def check_rewritable(folder: Path) -> None:
    """Checks what a start will rewrite in a log folder, and changes nothing.

    Raises:
        ConfigError: a file cannot be read, or is a folder; or nothing can be written.
    """
    try:
        for path in (folder / name for name in _REWRITTEN):
            if path.exists():
                open_regular(path).close()
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        raise unusable(folder, error) from error


def unusable(path: Path, error: OSError) -> ConfigError:
    """The error for a file in the log folder. Args: path: its name, if the system's error has none."""
    return ConfigError(
        f"trainer.log_dir: {error.filename or path} cannot be read and written ({error.strerror}). Move it away, free up disk"
        " space, or set another folder"
    )


def finite(value: float) -> float | None:
    """A number as JSON knows it: null for NaN and infinity."""
    return value if math.isfinite(value) else None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The complete records of a file of JSON lines, without those that a later attempt of the run supersedes.

    Lines that are not records are ignored, such as a last line that was cut off when the process was killed.
    """
    records, _ = parse_jsonl(read_bytes(path) if path.exists() else b"")
    return surviving(records, attempt_ends(records))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, without values that are neither null nor a number that a metric may have."""
    return [{name: value for name, value in one.items() if _has_form(value, float)} for one in read_jsonl(path)]


def parse_jsonl(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """All records, and the number of other lines. An incomplete last line is not counted."""
    records, num_others = [], 0
    for line in io.BytesIO(content):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and is_count(record.get("step")) and is_count(record.get("attempt", 0)):
            records.append(record)
        else:
            num_others += line.endswith(b"\n")
    return records, num_others


def parse_records(file: str, content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The records of a file that have its form, without secrets, which earlier versions wrote, and the number of others."""
    records, num_others = parse_jsonl(content)
    of = lambda record: _FORMS.get(str(record.get("type")) if file == EVENTS else file)  # noqa: E731
    sound = [record for record in records if _has_form(record, of(record))]
    return redact(sound), num_others + len(records) - len(sound)


def _has_form(value: Any, form: Any) -> bool:
    """Tells whether a JSON value has a form: a type, a list of one form, a tuple of forms, or a mapping with certain keys."""
    if isinstance(form, dict):
        of_key = lambda key: value.values() if key is str else [value.get(key, ...)]  # noqa: E731
        return isinstance(value, dict) and all(_has_form(one, of) for key, of in form.items() for one in of_key(key))
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(one, form[0]) for one in value)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(_has_form, value, form))
    if form is float:
        return value is None or (type(value) in (int, float) and abs(value) <= _MAX_METRIC)  # false for nan
    return is_count(value) if form is int else form is str and isinstance(value, str)


def attempt_ends(records: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """attempt -> the first of its steps that a later attempt repeated; infinity for the last attempt."""
    first_steps: dict[int, int] = {}
    for record in records:
        first_steps.setdefault(record.get("attempt", 0), record["step"])
    return {
        one: min((step for other, step in first_steps.items() if other > one), default=math.inf) for one in first_steps
    }


def surviving(records: Sequence[dict[str, Any]], ends: Mapping[int, float]) -> list[dict[str, Any]]:
    """The records before the ends of their attempts."""
    return [record for record in records if record["step"] < ends.get(record.get("attempt", 0), math.inf)]


def drop_after(path: Path, place: tuple[int, int], warn: Callable[[str], None]) -> Callable[[], None]:
    """Reads a file. Returns what removes its records after an attempt and step, and those of later attempts.

    A file with other lines is also copied then.
    """
    if not path.exists():
        return lambda: None
    attempt, step = place

    def stays(record: Mapping[str, float]) -> bool:
        number = record.get("attempt", 0)
        return number < attempt or (number == attempt and record["step"] <= step)

    content = read_bytes(path)
    records, num_others = parse_jsonl(content)

    def drop() -> None:
        if num_others:
            aside = free_path(path.with_name(f"{path.name}.damaged"))
            aside.write_bytes(content)
            warn(
                f"warning: {num_others} lines of {path} are not records of this run. They are left out; {aside} has the old"
                " file"
            )
        unfinished = path.with_name(path.name + ".unfinished")
        with open(unfinished, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in filter(stays, records))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)

    return drop


def is_count(value: Any) -> TypeGuard[int]:
    """Tells whether a value is a number of steps, as a record may have it."""
    return type(value) is int and 0 <= value <= _MAX_STEP
