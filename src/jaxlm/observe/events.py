"""What pictures mark in a run: resumes, phases, changes of the batch size, skipped steps, spikes, and where it went back."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.core.guards import SKIPPED
from jaxlm.core.values.logged import DURATION, EXAMPLES_PER_SECOND, IS_SPIKE, RESUMED_FROM
from jaxlm.observe.decision_notes import Band, strategy_bands
from jaxlm.observe.logged_run import LoggedRun, Series

MAX_MARKS = 30  # vertical lines of each kind and run; more of them would hide the curves
_MAX_BANDS = 200
_MESSAGE = re.compile(r"^step (\d+): (.*); update skipped \(\d+ skipped so far\)\. Batch: ?(.*)$", re.MULTILINE)


class Mark(NamedTuple):
    """A vertical line at a step."""

    step: int
    text: str


class SkippedStep(NamedTuple):
    """A skipped step. Reason and batch are empty if the console output does not have them."""

    step: int
    reason: str
    batch: str


def events(run: LoggedRun) -> Iterator[tuple[str, list[Mark]]]:
    """What pictures mark with vertical lines, by kind, oldest first."""
    yield "resumes", [Mark(step, "resumed") for step in resumes(run)]
    phases = [
        (re.match(r"steps (\d+) to", value), name) for name, value in run.start_table() if name.startswith("phase ")
    ]
    yield "phases", [Mark(int(begin[1]), name) for begin, name in phases[1:] if begin]
    steps, sizes = batch_sizes(run)
    changes = np.flatnonzero(np.diff(sizes)) + 1
    yield "batch sizes", [Mark(int(steps[index]) - 1, f"batch {sizes[index]:.0f}") for index in changes]
    yield "skipped steps", [Mark(skipped.step, "skipped") for skipped in skipped_steps(run)]
    yield "spikes", [Mark(step, "spike") for step in spikes(run)]
    rollbacks = [decision for decision in run.decisions if decision.is_rollback and decision.is_done]
    yield "rollbacks", [Mark(decision.shown_at, "went back") for decision in rollbacks]


def strategies(run: LoggedRun) -> list[Band]:
    """Which strategy of a portfolio of optimizers trained which steps. Of very many bands, the newest."""
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


def skipped_steps(run: LoggedRun) -> Sequence[SkippedStep]:
    """The skipped steps of a run, in order, without those that it went back over."""
    steps, counts = run[SKIPPED]
    known = np.isfinite(counts)
    steps, counts = steps[known], counts[known]
    increases = np.diff(counts, prepend=0.0) > 0
    logged = {int(step): (reason, batch) for step, reason, batch in _MESSAGE.findall(run.log)}
    return [SkippedStep(step, *logged.get(step, ("", ""))) for step in steps[increases].tolist()]
