"""What a run's log folder holds, read for pictures and pages. It may be damaged, incomplete, or still being written."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.core.errors import ConfigError, listed
from jaxlm.core.redaction import redacted
from jaxlm.core.safe_io import read_bytes, read_stored
from jaxlm.core.stores import inaccessible, is_url, open_store, storage_errors
from jaxlm.observe.decision_notes import LoggedDecision, decisions_of
from jaxlm.observe.ledger import account, parse_lines
from jaxlm.observe.records import (
    COMPLETIONS,
    CONFIG,
    DECISIONS,
    ENVIRONMENT,
    EVENTS,
    LEDGER,
    METRICS,
    SAMPLES,
    TRAIN_LOG,
    attempt_ends,
    parse_jsonl,
    parse_records,
    surviving,
)

LOGS = Path("logs")
_OF_EVENTS = "the start-up table, the phases, the numbers of layers, and why steps were skipped"
_LARGEST = 1e300


class Series(NamedTuple):
    """A metric by step. Values are NaN where the record has null."""

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class LoggedRun:
    """Holds what a log folder says about a run.

    Attributes:
        name: the run's id, or the path as it was given if two runs have one id.
        series: metric -> values by step, without what the run went back over.
        samples: records with `step`, `name`, `prompt` and `text`.
        completions: records with `step`, `name`, `prompt`, `completion`, `rewards`, `reward` and `advantage`.
        config: the resolved configuration as YAML.
        events: records with a `type`, in the order in which they were written, without what the run went back over.
        goodput: activity -> seconds.
        unread: what the page lacks because files are damaged; one sentence for each file.
        decisions: of controllers, in the order in which they were made.
    """

    name: str
    series: Mapping[str, Series]
    samples: Sequence[Mapping[str, Any]] = ()
    completions: Sequence[Mapping[str, Any]] = ()
    config: str = ""
    events: Sequence[Mapping[str, Any]] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    goodput: Mapping[str, float] = field(default_factory=dict)
    unread: Sequence[str] = ()
    decisions: Sequence[LoggedDecision] = ()

    def __getitem__(self, name: str) -> Series:
        """A metric by step; empty if the run does not have it."""
        return self.series.get(name, Series(np.array([], dtype=int), np.array([])))

    def latest(self, name: str) -> float | None:
        """The last finite value of a metric."""
        values = self[name].values
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else None

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """The events of one type."""
        return [event for event in self.events if event["type"] == kind]

    def start_table(self) -> Sequence[tuple[str, str]]:
        """The table of the newest start, which says what runs on which devices."""
        return self.of("start")[-1]["rows"] if self.of("start") else ()


def read_runs(locations: Sequence[str]) -> list[LoggedRun]:
    """Reads runs, each given as the path or URL of its log folder, or as its id below `./logs`.

    Raises:
        ConfigError: one of them is not a run, or is given twice.
    """
    if repeated := {one for one in locations if locations.count(one) > 1}:
        raise ConfigError(f"report: {', '.join(sorted(repeated))} given twice. Give each run once")
    runs = [read_run(one) for one in locations]
    names = [run.name for run in runs]
    return [
        replace(run, name=one) if names.count(run.name) > 1 else run for run, one in zip(runs, locations, strict=True)
    ]


def read_run(location: str) -> LoggedRun:
    """Reads one run, as `read_runs` does."""
    if is_url(location):
        fs, root = open_store(location, "report")

        def read(name: str) -> bytes:
            with storage_errors(inaccessible(f"report: {location} cannot be read"), passthrough=(FileNotFoundError,)):
                return read_stored(fs, f"{root}/{name}")

        return _read(location.rstrip("/").rsplit("/", 1)[-1], location, read)
    folder = local_folder(location)

    def read_local(name: str) -> bytes:
        try:
            return read_bytes(folder / name)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ConfigError(
                f"report: {folder / name} cannot be read ({error.strerror or error}). Check its path and permissions"
            ) from error

    return _read(folder.resolve().name, location, read_local)


def local_folder(location: str) -> Path:
    """The log folder of a run, given as a path or as an id below `./logs`. A folder is one if it has metrics."""
    folders = (Path(location), LOGS / location)
    runs = [folder for folder in folders if os.path.exists(folder / METRICS)]  # false for a name that is too long
    return next(iter(runs or filter(os.path.isdir, folders)), folders[0])


def _read(name: str, location: str, read: Callable[[str], bytes]) -> LoggedRun:
    def optional(file: str) -> bytes:
        try:
            return read(file)
        except FileNotFoundError:
            return b""

    def text(file: str) -> str:
        return redacted(optional(file).decode(errors="replace"))

    try:
        records, num_damaged = parse_jsonl(read(METRICS))
    except FileNotFoundError:
        raise ConfigError(_no_run(location)) from None
    unread = _left_out(METRICS, len(records), num_damaged)

    def parsed(file: str) -> list[Any]:
        content = optional(file)
        lines, num_damaged = parse_lines(content) if file == LEDGER else parse_records(file, content)
        unread.extend(_left_out(file, len(lines), num_damaged))
        return lines

    ends, goodput = attempt_ends(records), None
    samples, completions, events, decisions = map(parsed, (SAMPLES, COMPLETIONS, EVENTS, DECISIONS))
    if not optional(EVENTS) and optional(TRAIN_LOG):
        unread.append(f"{EVENTS} is missing, as in runs of earlier versions. It has {_OF_EVENTS}")
    try:
        goodput = account(parsed(LEDGER))
    except ConfigError as error:  # the page is about much more
        unread.append(str(error))
    return LoggedRun(
        name,
        series_of(surviving(records, ends)),
        surviving(samples, ends),
        surviving(completions, ends),
        text(CONFIG),
        surviving(events, ends),
        _texts(text(ENVIRONMENT)),
        {} if goodput is None else goodput.seconds,
        unread,
        decisions_of(decisions, ends),
    )


def _left_out(file: str, num_read: int, num_damaged: int) -> list[str]:
    """A sentence about the lines of a file that could not be read; none if there are none."""
    if not num_damaged:
        return []
    verb = "is" if num_damaged == 1 else "are"
    return [f"{num_damaged:,} of {num_read + num_damaged:,} lines of {file} could not be read and {verb} left out"]


def _no_run(location: str) -> str:
    names = sorted(path.parent.name for path in LOGS.glob(f"*/{METRICS}"))
    return (
        f"report: '{location}' given, which is not a run: it has no {METRICS}. Give the log folder of a run, its URL, or"
        f" a run's id below ./{LOGS} ({f'runs there: {listed(names)}' if names else 'no runs are there'})"
    )


def series_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """The metrics of some records, without values that are neither null nor a number."""
    points: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        step = record["step"]
        for name, value in record.items():
            if value is not None and type(value) not in (int, float):
                continue
            steps, values = points.setdefault(name, ([], []))
            steps.append(step)
            values.append(np.nan if value is None or abs(value) > _LARGEST else value)
    for key in ("step", "attempt"):
        points.pop(key, None)
    return {name: Series(np.array(steps), np.array(values, dtype=float)) for name, (steps, values) in points.items()}


def _texts(content: str) -> dict[str, str]:
    """A JSON object with its values as text; empty for anything else."""
    try:
        parsed = json.loads(content or "{}")
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(value) for name, value in parsed.items()} if isinstance(parsed, dict) else {}
