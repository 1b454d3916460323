"""Which charts a page has, and which metrics of the runs they show."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.core.guards import GRADIENT_NORM
from jaxlm.engine.metric_names import (
    BEST_BPB,
    DURATION,
    EVAL_LOSS,
    EVAL_PREFIX,
    EXAMPLES_PER_SECOND,
    GLOBAL_STEP,
    LEARNING_RATE,
    PROGRESS,
    RESUMED_FROM,
    TOKENS_PER_SECOND,
    TRAIN_LOSS,
)
from jaxlm.observe.page.figure import Chart, Curve, Mark, draw
from jaxlm.observe.page.logged_run import LoggedRun, Series
from jaxlm.observe.page.skipped import skipped_steps

_MAX_FURTHER = 40
_MAX_MARKS = 30  # vertical lines of each kind and run; more of them would hide the curves
_NO_CURVES = {RESUMED_FROM, GLOBAL_STEP, PROGRESS}
_BATCH = "batch size"


class _Kind(NamedTuple):
    """A chart of the metrics whose whole name matches a regular expression."""

    title: str
    unit: str
    metrics: str
    is_noisy: bool = False
    is_log: bool = False


_KINDS = (
    _Kind("Loss", "nats per token", f"{TRAIN_LOSS}|{EVAL_LOSS}", is_noisy=True),
    _Kind("Validation losses of parts and averages", "nats per token", f"{EVAL_PREFIX}.+/loss"),
    _Kind("Bits per byte", "", f"{EVAL_PREFIX}(.+/)?bpb|{BEST_BPB}"),
    _Kind("CORE", "", f"{EVAL_PREFIX}(.+/)?core"),
    _Kind("Tasks of CORE, centered", "", f"{EVAL_PREFIX}(.+/)?core/[^/]+"),
    _Kind("Tasks of CORE, accuracy", "", f"{EVAL_PREFIX}(.+/)?core/[^/]+/accuracy"),
    _Kind("Learning rate", "", f"{LEARNING_RATE}(/.*)?"),
    _Kind("Batch size", "sequences", _BATCH),
    _Kind("Gradient norm", "", GRADIENT_NORM, is_noisy=True, is_log=True),
    _Kind("Throughput", "tokens per second", TOKENS_PER_SECOND, is_noisy=True),
    _Kind("Step time", "seconds", DURATION),
)

_Metrics = Sequence[Mapping[str, Series]]


class Charts(NamedTuple):
    """The charts of a page.

    Attributes:
        main: those to show at once.
        further: those of all other metrics.
        left_out: the metrics for which there were too many.
        unmarked: (run, sentence) about vertical lines that are left out, because there were too many.
    """

    main: Sequence[Chart]
    further: Sequence[Chart]
    left_out: Sequence[str]
    unmarked: Sequence[tuple[str, str]]


def charts(runs: Sequence[LoggedRun]) -> Charts:
    """All charts of some runs, each with the curves of all of them."""
    metrics = _with_batch_sizes(runs)
    names = sorted({name for one in metrics for name in one} - _NO_CURVES)
    rest = [name for name in names if not any(re.fullmatch(kind.metrics, name) for kind in _KINDS)]
    evals = [name for name in rest if name.startswith(EVAL_PREFIX)]
    single = [_Kind(name, "", re.escape(name)) for name in (*evals, *(n for n in rest if n not in evals))]
    end = len(evals) + _MAX_FURTHER
    events = [(run.name, kind, found) for run in runs for kind, found in _events(run)]
    marks = [mark for _, _, found in events for mark in found[-_MAX_MARKS:]]
    return Charts(
        list(_drawn([*_KINDS, *single[: len(evals)]], runs, metrics, marks)),
        list(_drawn(single[len(evals) : end], runs, metrics, marks)),
        [kind.title for kind in single[end:]],
        [
            (run, f"{len(found) - _MAX_MARKS:,} earlier {kind} have no line in the charts")
            for run, kind, found in events
            if len(found) > _MAX_MARKS
        ],
    )


def _drawn(
    kinds: Sequence[_Kind], runs: Sequence[LoggedRun], metrics: _Metrics, marks: Sequence[Mark]
) -> Iterator[Chart]:
    for kind in kinds:
        found = sorted({name for one in metrics for name in one if re.fullmatch(kind.metrics, name)}, reverse=True)
        curves = [
            Curve(run, number, _label(runs[run].name, name, len(runs), len(found)), one[name])
            for run, one in enumerate(metrics)
            for number, name in enumerate(found)
            if name in one
        ]
        if curves:
            style = {"is_noisy": kind.is_noisy, "is_log": kind.is_log}
            yield draw(kind.title, kind.unit, curves, marks, num_runs=len(runs), **style)


def _label(run: str, metric: str, num_runs: int, num_metrics: int) -> str:
    if num_runs == 1:
        return metric
    return run if num_metrics == 1 else f"{run}: {metric}"


def _with_batch_sizes(runs: Sequence[LoggedRun]) -> _Metrics:
    """The metrics of each run, with the batch size by step unless it is one number for all."""
    sizes = [_batch_sizes(run) for run in runs]
    if len(np.unique(np.concatenate([one.values for one in sizes]))) <= 1:
        return [run.series for run in runs]
    return [{**run.series, _BATCH: one} if len(one.steps) else run.series for run, one in zip(runs, sizes, strict=True)]


def _batch_sizes(run: LoggedRun) -> Series:
    """The sequences in the batch of each step, as far as they are known."""
    nothing = Series(np.array([], dtype=int), np.array([]))
    steps, seconds = run.series.get(DURATION, nothing)
    rate_steps, rates = run.series.get(EXAMPLES_PER_SECOND, nothing)
    if not np.array_equal(steps, rate_steps):
        return nothing
    products = seconds * rates
    known = np.isfinite(products)
    return Series(steps[known], products[known].round())


def _events(run: LoggedRun) -> Iterator[tuple[str, list[Mark]]]:
    """What charts mark with vertical lines, by kind, oldest first."""
    resumed = run.series[RESUMED_FROM].values if RESUMED_FROM in run.series else np.array([])
    yield "resumes", [Mark(int(step), "resumed") for step in resumed[np.isfinite(resumed)]]
    phases = [
        (re.match(r"steps (\d+) to", value), name) for name, value in run.start_table() if name.startswith("phase ")
    ]
    yield "phases", [Mark(int(begin[1]), name) for begin, name in phases[1:] if begin]
    yield "skipped steps", [Mark(one.step, "skipped") for one in skipped_steps(run)]
