"""Plots of a run: loss, learning rate and step times."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.engine.metric_names import (
    DURATION,
    EVAL_LOSS,
    EXAMPLES_PER_SECOND,
    LEARNING_RATE,
    RESUMED_FROM,
    TRAIN_LOSS,
)
from jaxlm.engine.phases import Phase
from jaxlm.optim.groups import group_schedules
from jaxlm.optim.lr.schedules import Schedule

_SMOOTHING_WIDTH = 0.02  # width of the moving average, as a fraction of the steps
_MAX_POINTS = 2000  # points of a computed curve
_NUM_BINS = 60
_MAX_LABELS = 24  # labels of points; more would overlap
_RIGHT = 0.8  # points after this fraction of the steps have their label below

Records = Sequence[Mapping[str, float | None]]


@dataclass(frozen=True)
class Marks:
    """Events of a run, by the number of steps done before them.

    Attributes:
        resumed: where a start continued from a checkpoint.
        batch_sizes: where the batch size changed -> the new one.
    """

    resumed: tuple[int, ...]
    batch_sizes: Mapping[int, int]

    @classmethod
    def of(cls, records: Records) -> "Marks":
        """The events in a run's records."""
        steps, sizes = _batch_sizes(records)
        changes = np.flatnonzero(np.diff(sizes)) + 1
        return cls(
            tuple(int(step) for step in _series(records, RESUMED_FROM)[1]),
            {int(steps[index]) - 1: int(sizes[index]) for index in changes},
        )

    def draw(self, axes: Any) -> None:
        """Draws a vertical line for each event."""
        for number, step in enumerate(self.resumed):
            axes.axvline(step, color="0.4", linestyle="--", linewidth=0.8, label=None if number else "resumed")
        for number, (step, size) in enumerate(self.batch_sizes.items()):
            label = None if number else "batch size changed"
            axes.axvline(step, color="tab:green", linestyle=":", linewidth=1, label=label)
            if len(self.batch_sizes) <= _MAX_LABELS:
                place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "rotation": 90}
                axes.annotate(f"batch {size}", (step, 0.02), (2, 0), fontsize=7, color="tab:green", **place)


def loss_curve(records: Records, path: Path, title: str) -> None:
    """Plots training loss (per step, and a centered moving average) and validation loss by step, as a PNG."""
    figure, axes = _figure("xaxis")
    steps, losses = _series(records, TRAIN_LOSS)
    if len(steps):
        half = round(len(steps) * _SMOOTHING_WIDTH / 2)
        width = 2 * half + 1
        if half:
            axes.plot(steps, losses, color="0.8", linewidth=0.8, label="training, per step")
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        label = f"training, mean of {width}" if half else "training"
        axes.plot(steps[half : len(steps) - half], smooth, color="tab:blue", label=label)
    steps, losses = _series(records, EVAL_LOSS)
    if len(steps):
        axes.plot(steps, losses, "o-", color="tab:orange", markersize=4, label="validation")
    Marks.of(records).draw(axes)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    _save(figure, path)


def schedule_curve(phases: Sequence[Phase], path: Path, title: str, records: Records = ()) -> None:
    """Plots the learning rate by step over all phases, as a PNG: what the records say was applied, and what is planned from
    there on. Corner points of the plan are marked, except where something else was applied. Parameter groups are dashed.
    """
    figure, axes = _figure("xaxis")
    has_begun = bool(_series(records, LEARNING_RATE)[0].size)
    for phase in phases:
        schedule, groups = phase.optimizer.schedule(phase.num_steps), group_schedules(phase.optimizer, phase.num_steps)
        applied = _applied(records, phase, LEARNING_RATE)
        main_style = {"color": f"C{phase.index % 10}"}
        _plot_rates(axes, phase, schedule, applied, phase.name, main_style, has_begun=has_begun)
        for number, (name, other) in enumerate(groups.items()):
            style = {"color": f"C{(phase.index + number + 1) % 10}", "linestyle": "--", "linewidth": 0.8}
            own, label = _applied(records, phase, f"{LEARNING_RATE}/{name}"), f"{phase.name}: {name}"
            _plot_rates(axes, phase, other, own, label, style, has_begun=has_begun)
        _mark_corners(axes, phase, schedule, applied, phases[-1].end)
    Marks.of(records).draw(axes)
    axes.set(title=title, xlabel="step", ylabel="learning rate")
    axes.margins(x=0.12, y=0.2)
    axes.legend()
    _save(figure, path)


def _applied(records: Records, phase: Phase, name: str) -> dict[int, float]:
    """The learning rates of a phase's updates, by the number of updates before."""
    steps, rates = _series(records, name)
    rows = zip((steps - 1).tolist(), rates.tolist(), strict=True)
    return {step: rate for step, rate in rows if phase.start <= step < phase.end}


def _plot_rates(
    axes: Any,
    phase: Phase,
    schedule: Schedule,
    applied: Mapping[int, float],
    label: str,
    style: Mapping[str, Any],
    *,
    has_begun: bool,
) -> None:
    """Plots what was applied, and what is planned after it, which is dotted if the run has begun."""
    begin = max(applied, default=phase.start - 1) + 1
    if applied:
        axes.plot(list(applied), list(applied.values()), label=label, **style)
    if begin < phase.end:
        if has_begun:
            label, style = f"{label}, planned", {**style, "linestyle": ":"}
        steps = np.unique(np.linspace(begin, phase.end, _MAX_POINTS).round())
        axes.plot(steps, schedule(steps - phase.first_scheduled), label=label, **style)


def _mark_corners(axes: Any, phase: Phase, schedule: Schedule, applied: Mapping[int, float], end: int) -> None:
    """Marks and names the corner points, except where another rate was applied. Args: end: of the whole run."""
    points = [(phase.first_scheduled + step, rate, name) for step, rate, name in schedule.corner_points()]
    points = [
        (step, rate, name)
        for step, rate, name in points
        if phase.start <= step <= phase.end and np.isclose(applied.get(step, rate), rate, rtol=0.05)
    ]
    for step, rate, name in points if len(points) <= _MAX_LABELS else []:
        axes.plot(step, rate, "o", color=f"C{phase.index % 10}", markersize=4)
        side = {"xytext": (0, -5), "ha": "center", "va": "top"} if step > _RIGHT * end else {"xytext": (4, 4)}
        axes.annotate(f"{name}\nstep {step}: {rate:.3g}", (step, rate), textcoords="offset points", fontsize=7, **side)


@dataclass(frozen=True)
class StepTimes:
    """Duration of each step of a run, and its batch size."""

    durations_ms: np.ndarray
    batch_sizes: np.ndarray

    @property
    def median_ms(self) -> float:
        return float(np.median(self.durations_ms))

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.durations_ms, 99))


def step_times(records: Records, exclude: Collection[int]) -> StepTimes | None:
    """The step durations in a run's records, without the first step of each start; None if there are none.

    `exclude` contains the first step of each phase, which also includes warm-up.
    """
    steps, seconds = _series(records, DURATION)
    excluded = {*exclude, *(step + 1 for step in Marks.of(records).resumed)}
    included = ~np.isin(steps, list(excluded))
    sizes = _batch_sizes(records)[1]
    return StepTimes(seconds[included] * 1e3, sizes[included]) if included.any() else None


def step_time_histogram(times: StepTimes, path: Path, title: str) -> None:
    """Plots the durations as a histogram with median and 99th percentile marked, as a PNG; a color for each batch size.

    Steps longer than twice the 99th percentile are counted in the legend, so that they do not compress the plot.
    """
    figure, axes = _figure("yaxis")
    end = 2 * times.p99_ms
    shown = times.durations_ms <= end
    sizes = np.unique(times.batch_sizes)
    durations = [times.durations_ms[shown & (times.batch_sizes == size)] for size in sizes]
    labels = [f"batch of {size}" if len(sizes) > 1 else "" for size in sizes]  # the legend leaves an empty label out
    axes.hist(
        durations,
        bins=_NUM_BINS,
        stacked=True,
        color=[str(c) for c in np.linspace(0.75, 0.4, len(sizes))],
        label=labels,
    )
    axes.axvline(times.median_ms, color="tab:blue", label=f"median {times.median_ms:.1f} ms")
    axes.axvline(times.p99_ms, color="tab:red", label=f"99th percentile {times.p99_ms:.1f} ms")
    if not shown.all():
        beyond, longest = int((~shown).sum()), times.durations_ms.max()
        axes.plot([], [], " ", label=f"{beyond} above {end:.1f} ms, maximum {longest:.1f} ms")
    axes.set(title=title, xlabel="step duration (ms)", ylabel="steps")
    axes.legend()
    _save(figure, path)


def _figure(*integer_axes: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120)
    figure.subplots_adjust(
        left=0.1, right=0.98, bottom=0.11, top=0.93
    )  # computing the margins would draw everything twice
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    for axis in integer_axes:  # steps are integers
        getattr(axes, axis).set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_png(path)


def _series(records: Records, name: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return (np.array([p[0] for p in points], dtype=int), np.array([p[1] for p in points], dtype=float))


def _batch_sizes(records: Records) -> tuple[np.ndarray, np.ndarray]:
    """(step, sequences in its batch) of the records with a duration; 0 where the rate is not known."""
    steps, seconds = _series(records, DURATION)
    rates = dict(zip(*_series(records, EXAMPLES_PER_SECOND), strict=True))
    return steps, np.array(
        [round(rates.get(step, 0) * duration) for step, duration in zip(steps, seconds, strict=True)]
    )
