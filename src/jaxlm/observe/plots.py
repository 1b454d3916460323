"""The run as pictures: loss, learning rate, time of a step."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.engine.phases import Phase

_AVERAGED_OVER = 0.02  # of the steps: width of the moving average
_MOST_POINTS = 2000  # of a curve that is computed
_NUM_BINS = 60
_MOST_LABELS = 24  # of corner points; more would hide each other

Records = Sequence[Mapping[str, float | None]]


def loss_curve(records: Records, path: Path, title: str) -> None:
    """Draws training loss (each step, and averaged) and validation loss by step, as a PNG."""
    figure, axes = _figure("xaxis")
    steps, losses = _series(records, "train/loss")
    if len(steps):
        width = max(1, round(len(steps) * _AVERAGED_OVER))
        if width > 1:
            axes.plot(steps, losses, color="0.8", linewidth=0.8, label="training, each step")
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(
            steps[width - 1 :],
            smooth,
            color="tab:blue",
            label=f"training, mean of {width}" if width > 1 else "training",
        )
    steps, losses = _series(records, "eval/loss")
    if len(steps):
        axes.plot(steps, losses, "o-", color="tab:orange", markersize=4, label="validation")
    axes.set(title=title, xlabel="step", ylabel="loss (nats a token)")
    axes.legend()
    _save(figure, path)


def schedule_curve(phases: Sequence[Phase], path: Path, title: str) -> None:
    """Draws the learning rate by step over all phases, with its corner points marked, as a PNG."""
    figure, axes = _figure("xaxis")
    for phase in phases:
        schedule = phase.optimizer.schedule(phase.num_steps)
        steps = np.unique(np.linspace(0, phase.num_steps, _MOST_POINTS).round())
        axes.plot(
            phase.start + steps,
            schedule(steps),
            color=f"C{phase.index % 10}",
            label=phase.name,
        )
        corners = schedule.corner_points()
        for step, rate, name in corners if len(corners) <= _MOST_LABELS else []:
            axes.plot(phase.start + step, rate, "o", color=f"C{phase.index % 10}", markersize=4)
            place, text = (phase.start + step, rate), f"{name}\n{phase.start + step}: {rate:.3g}"
            axes.annotate(text, place, (4, 4), textcoords="offset points", fontsize=7)
    axes.set(title=title, xlabel="step", ylabel="learning rate")
    axes.margins(x=0.12, y=0.12)
    axes.legend()
    _save(figure, path)


@dataclass(frozen=True)
class StepTimes:
    """How long the steps took.

    Attributes:
        durations_ms: of each, in the order of the steps.
    """

    durations_ms: np.ndarray

    @property
    def median_ms(self) -> float:
        """Half of the steps were faster."""
        return float(np.median(self.durations_ms))

    @property
    def p99_ms(self) -> float:
        """99 of 100 steps were faster."""
        return float(np.percentile(self.durations_ms, 99))


def step_times(records: Records, left_out: Collection[int]) -> StepTimes | None:
    """The durations in a run's records, in ms; None where there are none.

    Args:
        left_out: steps that do not count: the first ones of the phases, which warm a program up.
    """
    steps, seconds = _series(records, "throughput/duration")
    kept = seconds[~np.isin(steps, list(left_out))] if len(steps) else seconds
    return StepTimes(kept * 1e3) if len(kept) else None


def step_time_histogram(times: StepTimes, path: Path, title: str) -> None:
    """Draws the durations as a histogram with median and 99th percentile marked, as a PNG.

    What took longer than twice the 99th percentile is counted in the legend instead of squeezing all the rest.
    """
    figure, axes = _figure("yaxis")
    durations = times.durations_ms
    end = 2 * times.p99_ms
    beyond = int((durations > end).sum())
    axes.hist(durations[durations <= end], bins=_NUM_BINS, color="0.75")
    axes.axvline(times.median_ms, color="tab:blue", label=f"median {times.median_ms:.1f} ms")
    axes.axvline(times.p99_ms, color="tab:red", label=f"99 % within {times.p99_ms:.1f} ms")
    if beyond:
        axes.plot([], [], " ", label=f"{beyond} beyond {end:.1f} ms, at most {durations.max():.1f} ms")
    axes.set(title=title, xlabel="duration of a step (ms)", ylabel="steps")
    axes.legend()
    _save(figure, path)


def _figure(*whole: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    for axis in whole:  # there is no half of a step
        getattr(axes, axis).set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_png(path)


def _series(records: Records, name: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return (np.array([p[0] for p in points]), np.array([p[1] for p in points], dtype=float))
