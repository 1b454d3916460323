"""What has happened in a run, for pictures and tables: resumes, skipped steps, changes of the batch size, its phases."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxlm.core.guards import SKIPPED
from jaxlm.core.values.logged import (
    DURATION,
    EVAL_LOSS,
    EXAMPLES_PER_SECOND,
    IS_SPIKE,
    RESUMED_FROM,
    TOTAL_TOKENS,
    TRAIN_LOSS,
    LayerTable,
)
from jaxlm.observe.decision_notes import Band, strategy_bands
from jaxlm.observe.logged_run import LoggedRun, Series

LAYERS_ROW, TRAINS_ROW, HIDDEN_ROW = "layers", "trains", "hidden tokens"
"""Rows in the table of a phase that the table of all phases shows too."""
_COLUMNS = ("steps", LAYERS_ROW, TRAINS_ROW, HIDDEN_ROW, "stored", "training loss", "validation loss", "tokens")


class PhaseRecord(NamedTuple):
    """A phase that has begun. Texts are empty for what the phase does not have.

    Attributes:
        start, end: steps of the run before the phase and after it, as planned when it was entered.
        hidden: how many tokens of its sequences are hidden.
        stored: sequences and bytes of what its objective reads from disk, such as the output of a frozen trunk.
        losses: first and last training loss; empty before the first step.
        validation_loss: the last one; None if there is none.
        num_tokens: tokens that it has trained on.
    """

    name: str
    start: int
    end: int
    layers: str
    trains: str
    hidden: str
    stored: str
    losses: tuple[float, ...]
    validation_loss: float | None
    num_tokens: int

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts that tables show of it, in the order of `_COLUMNS`."""
        losses = " to ".join(f"{loss:.4f}" for loss in self.losses)
        validation = "" if self.validation_loss is None else f"{self.validation_loss:.4f}"
        texts = (f"{self.start} to {self.end}", self.layers, self.trains, self.hidden, self.stored)
        return (*texts, losses, validation, f"{self.num_tokens:,}")

    @property
    def summary(self) -> str:
        """The same as one line."""
        return "; ".join(f"{name} {cell}" for name, cell in zip(_COLUMNS, self.cells, strict=True) if cell)


def phase_history(run: LoggedRun) -> list[PhaseRecord]:
    """The phases that a run has entered, in order; none for a run of a single phase, about which other tables say it."""
    phases = {one["name"]: one for one in run.of("phase")}  # the last of each, for one that has resumed
    has_several = any(one["num_phases"] > 1 for one in phases.values())
    return [_record(run, one) for one in phases.values()] if has_several else []


def _record(run: LoggedRun, phase: Mapping[str, Any]) -> PhaseRecord:
    name, start, end, rows = phase["name"], phase["start"], phase["end"], dict(phase["rows"])
    losses, validation = (_between(run, metric, start, end) for metric in (TRAIN_LOSS, EVAL_LOSS))
    after, before = ([0.0, *_between(run, TOTAL_TOKENS, 0, step)][-1] for step in (end, start))
    since = next(number for number, event in enumerate(run.events) if event is phase)
    read = [one for one in run.events[since:] if one["type"] == "stored" and one["phase"] == name]
    # The last of each folder, for a phase that went back.
    stored = {one["folder"]: f"{one['count']:,} sequences ({one['megabytes']:,.1f} MB)" for one in read}
    return PhaseRecord(
        name,
        start,
        end,
        rows.get(LAYERS_ROW, ""),
        rows.get(TRAINS_ROW, ""),
        rows.get(HIDDEN_ROW, ""),
        " and ".join(stored.values()),
        (losses[0], losses[-1]) if len(losses) else (),
        validation[-1] if len(validation) else None,
        int(after - before),
    )


def _between(run: LoggedRun, name: str, start: int, end: int) -> list[float]:
    """The finite values of a metric after the steps from `start + 1` to `end`."""
    steps, values = run[name]
    return values[(steps > start) & (steps <= end) & np.isfinite(values)].tolist()


def phase_table(records: Sequence[PhaseRecord]) -> tuple[list[str], list[list[str]]]:
    """Names of the columns that any of the phases has something in, and a row for each phase, beginning with its name."""
    cells = [record.cells for record in records]
    used = [number for number in range(len(_COLUMNS)) if any(row[number] for row in cells)]
    rows = [[record.name, *(row[number] for number in used)] for record, row in zip(records, cells, strict=True)]
    return [_COLUMNS[number] for number in used], rows


MAX_MARKS = 30  # vertical lines of each kind and run; more of them would hide the curves
_MAX_BANDS = 200


class Mark(NamedTuple):
    """A vertical line at a step."""

    step: int
    text: str


class SkippedStep(NamedTuple):
    """A skipped step. Reason and batch are empty if no event says them."""

    step: int
    reason: str
    batch: str


def events(run: LoggedRun) -> Iterator[tuple[str, list[Mark]]]:
    """Lists what pictures mark with vertical lines, by kind, oldest first."""
    yield "resumes", [Mark(step, "resumed") for step in resumes(run)]
    begins = {one["name"]: one["start"] for one in run.of("phase") if one["start"]}
    yield "phases", [Mark(start, f"phase {name}") for name, start in begins.items()]
    steps, sizes = batch_sizes(run)
    changes = np.flatnonzero(np.diff(sizes)) + 1
    yield "batch sizes", [Mark(int(steps[index]) - 1, f"batch {sizes[index]:.0f}") for index in changes]
    yield "skipped steps", [Mark(skipped.step, "skipped") for skipped in skipped_steps(run)]
    yield "spikes", [Mark(step, "spike") for step in spikes(run)]
    rollbacks = [decision for decision in run.decisions if decision.is_rollback and decision.is_done]
    yield "rollbacks", [Mark(decision.shown_at, "went back") for decision in rollbacks]


def strategies(run: LoggedRun) -> list[Band]:
    """Lists which strategy of a portfolio of optimizers trained which steps. Of very many bands, the newest."""
    end = max((int(series.steps.max()) for series in run.series.values() if len(series.steps)), default=0)
    return strategy_bands(run.decisions, end)[-_MAX_BANDS:]


def spikes(run: LoggedRun) -> list[int]:
    """The first of each stretch of steps that the telemetry calls a spike."""
    steps, values = run[IS_SPIKE]
    flagged = steps[values > 0]
    return flagged[np.diff(flagged, prepend=-2) > 1].tolist()


def resumes(run: LoggedRun) -> list[int]:
    """The steps of the checkpoints from which the run was resumed."""
    steps = run[RESUMED_FROM].values
    return [int(step) for step in steps[np.isfinite(steps)]]


def batch_sizes(run: LoggedRun) -> Series:
    """The number of sequences in the batch of each step, where it is known."""
    steps, seconds = run[DURATION]
    rates = dict(zip(*run[EXAMPLES_PER_SECOND], strict=True))
    sizes = np.array([rates.get(step, np.nan) for step in steps]) * seconds
    known = np.isfinite(sizes)
    return Series(steps[known], sizes[known].round())


def layer_tables(run: LoggedRun) -> list[LayerTable]:
    """The numbers of layers, each table once: a run that was killed may have measured twice."""
    numbers = lambda rows: [[np.nan if x is None else x for x in row] for row in rows]  # noqa: E731
    found = [LayerTable(one["source"], one["title"], one["columns"], numbers(one["rows"])) for one in run.of("layers")]
    return list({one.text: one for one in found}.values())


def skipped_steps(run: LoggedRun) -> Sequence[SkippedStep]:
    """The skipped steps of a run, in order, without those that it went back over."""
    steps, counts = run[SKIPPED]
    known = np.isfinite(counts)
    steps, counts = steps[known], counts[known]
    increases = np.diff(counts, prepend=0.0) > 0
    logged = {one["step"]: (one["reason"], one["batch"]) for one in run.of("skip")}
    return [SkippedStep(step, *logged.get(step, ("", ""))) for step in steps[increases].tolist()]
