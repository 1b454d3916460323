"""Plots of a run: loss, learning rate and step times."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.engine.phases import Phase
from jaxlm.optim.groups import group_schedules

_SMOOTHING_WIDTH = 0.02  # width of the moving average, as a fraction of the steps
_MAX_POINTS = 2000  # points of a computed curve
_NUM_BINS = 60
_MAX_LABELS = 24  # labels of corner points; more would overlap

Records = Sequence[Mapping[str, float | None]]


def loss_curve(records: Records, path: Path, title: str) -> None:
    """Plots training loss (per step, and a moving average) and validation loss by step, as a PNG."""
    figure, axes = _figure("xaxis")
    steps, losses = _series(records, "train/loss")
    if len(steps):
        width = max(1, round(len(steps) * _SMOOTHING_WIDTH))
        if width > 1:
            axes.plot(steps, losses, color="0.8", linewidth=0.8, label="training, per step")
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        label = f"training, mean of {width}" if width > 1 else "training"
        axes.plot(steps[width - 1 :], smooth, color="tab:blue", label=label)
    steps, losses = _series(records, "eval/loss")
    if len(steps):
        axes.plot(steps, losses, "o-", color="tab:orange", markersize=4, label="validation")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    _save(figure, path)


def schedule_curve(phases: Sequence[Phase], path: Path, title: str) -> None:
    """Plots the learning rate by step over all phases, with its corner points marked, as a PNG.

    Parameter groups are dashed.
    """
    figure, axes = _figure("xaxis")
    for phase in phases:
        schedule = phase.optimizer.schedule(phase.num_steps)
        steps = np.unique(np.linspace(0, phase.end - phase.start, _MAX_POINTS).round())
        color = f"C{phase.index % 10}"
        axes.plot(phase.start + steps, schedule(steps), color=color, label=phase.name)
        for name, other in group_schedules(phase.optimizer, phase.num_steps).items():
            axes.plot(phase.start + steps, other(steps), "--", linewidth=0.8, label=f"{phase.name}: {name}")
        corners = [corner for corner in schedule.corner_points() if phase.start + corner[0] <= phase.end]
        for step, rate, name in corners if len(corners) <= _MAX_LABELS else []:
            axes.plot(phase.start + step, rate, "o", color=color, markersize=4)
            point, text = (phase.start + step, rate), f"{name}\n{phase.start + step}: {rate:.3g}"
            axes.annotate(text, point, (4, 4), textcoords="offset points", fontsize=7)
    axes.set(title=title, xlabel="step", ylabel="learning rate")
    axes.margins(x=0.12, y=0.12)
    axes.legend()
    _save(figure, path)


@dataclass(frozen=True)
class StepTimes:
    """Duration of each step of a run."""

    durations_ms: np.ndarray

    @property
    def median_ms(self) -> float:
        return float(np.median(self.durations_ms))

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.durations_ms, 99))


def step_times(records: Records, exclude: Collection[int]) -> StepTimes | None:
    """The step durations in a run's records; None if there are none.

    `exclude` contains the first step of each phase, which includes warm-up.
    """
    steps, seconds = _series(records, "throughput/duration")
    included = seconds[~np.isin(steps, list(exclude))] if len(steps) else seconds
    return StepTimes(included * 1e3) if len(included) else None


def step_time_histogram(times: StepTimes, path: Path, title: str) -> None:
    """Plots the durations as a histogram with median and 99th percentile marked, as a PNG.

    Steps longer than twice the 99th percentile are counted in the legend, so that they do not compress the plot.
    """
    figure, axes = _figure("yaxis")
    durations = times.durations_ms
    end = 2 * times.p99_ms
    beyond = int((durations > end).sum())
    axes.hist(durations[durations <= end], bins=_NUM_BINS, color="0.75")
    axes.axvline(times.median_ms, color="tab:blue", label=f"median {times.median_ms:.1f} ms")
    axes.axvline(times.p99_ms, color="tab:red", label=f"99th percentile {times.p99_ms:.1f} ms")
    if beyond:
        axes.plot([], [], " ", label=f"{beyond} above {end:.1f} ms, maximum {durations.max():.1f} ms")
    axes.set(title=title, xlabel="step duration (ms)", ylabel="steps")
    axes.legend()
    _save(figure, path)


def _figure(*integer_axes: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
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
    return (np.array([p[0] for p in points]), np.array([p[1] for p in points], dtype=float))
