"""PNGs of a run: loss, learning rate, step times, numbers of layers, and needles."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from jaxlm.core.values.logged import DURATION, EVAL_LOSS, LEARNING_RATE, TRAIN_LOSS, LayerTable
from jaxlm.engine.phases import Phase
from jaxlm.observe.curves import BAND_OPACITY, COLORS, NeedleGrid, band_colors, half_window, smoothed
from jaxlm.observe.events import MAX_MARKS, batch_sizes, events, resumes, strategies
from jaxlm.observe.logged_run import LoggedRun
from jaxlm.optim.groups import group_schedules
from jaxlm.optim.schedules import Schedule

_MAX_POINTS = 2000  # points of a computed curve
_NUM_BINS = 60
_MAP_COLUMNS = 4
_LEGEND_COLUMNS = 4
_MAX_LABELS = 24  # labels of points; more would overlap
_MAX_TITLE = 100  # characters that fit on a line
_RIGHT = 0.8  # points after this fraction of the steps have their label below
_LABEL_WIDTH = 0.02  # of a mark, as a fraction of the steps


def loss_curve(run: LoggedRun, path: Path, title: str) -> None:
    """Plots training loss (per step, and its moving average) and validation loss by step, as a PNG."""
    figure, axes = _figure("xaxis")
    training, validation = run[TRAIN_LOSS], run[EVAL_LOSS]
    half = half_window([training.steps])
    mean = smoothed(training, half)
    if len(mean.steps):
        axes.plot(*training, color=COLORS[0], alpha=0.3, linewidth=0.8, label="training, per step")
        axes.plot(*mean, color=COLORS[0], label=f"training, mean of {2 * half + 1}")
    elif len(training.steps):
        axes.plot(*training, color=COLORS[0], label="training")
    if len(validation.steps):
        axes.plot(*validation, "o-", color=COLORS[1], markersize=4, label="validation")
    _draw_strategies(axes, run)
    _mark_events(axes, run, "top")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    _save(figure, axes, path)


def schedule_curve(phases: Sequence[Phase], run: LoggedRun, path: Path, title: str) -> None:
    """Plots the learning rate by step over all phases, as a PNG: what was applied, and what is planned from there on.

    Corner points of the plan are marked, except where something else was applied. Parameter groups are dashed.
    """
    figure, axes = _figure("xaxis")
    has_begun = bool(len(run[LEARNING_RATE].steps))
    for phase in phases:
        schedule, groups = phase.optimizer.schedule(phase.num_steps), group_schedules(phase.optimizer, phase.num_steps)
        applied = _applied(run, phase, LEARNING_RATE)
        main_style = {"color": f"C{phase.index % 10}"}
        _plot_rates(axes, phase, schedule, applied, phase.name, main_style, has_begun=has_begun)
        for number, (name, other) in enumerate(groups.items()):
            style = {"color": f"C{(phase.index + number + 1) % 10}", "linestyle": "--", "linewidth": 0.8}
            rates, label = _applied(run, phase, f"{LEARNING_RATE}/{name}"), f"{phase.name}: {name}"
            _plot_rates(axes, phase, other, rates, label, style, has_begun=has_begun)
        _mark_corners(axes, phase, schedule, applied, phases[-1].end)
    _mark_events(axes, run, "bottom")
    axes.set(title=title, xlabel="step", ylabel="learning rate")
    axes.margins(x=0.12, y=0.2)
    _save(figure, axes, path)


def _applied(run: LoggedRun, phase: Phase, name: str) -> dict[int, float]:
    """The learning rates of a phase's updates, by the number of updates before."""
    rows = zip(*(column.tolist() for column in run[name]), strict=True)
    return {step - 1: rate for step, rate in rows if phase.start < step <= phase.end and np.isfinite(rate)}


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


def _draw_strategies(axes: Any, run: LoggedRun) -> None:
    """Colors the background of the steps of each strategy."""
    bands = strategies(run)
    colors = band_colors([band.name for band in bands])
    for name, color in colors.items():
        spans = [(band.begin, band.end - band.begin) for band in bands if band.name == name]
        label = name.replace("$", r"\$")  # which would begin a formula
        place = {"transform": axes.get_xaxis_transform(), "alpha": BAND_OPACITY, "linewidth": 0, "zorder": 0}
        axes.broken_barh(spans, (0, 1), color=color, label=label, **place)


def _mark_events(axes: Any, run: LoggedRun, side: str) -> None:
    """Draws a vertical line at each event, with its name at the "top" or the "bottom" unless it would overlap another."""
    begin, end = axes.get_xlim()
    named, height = -np.inf, {"top": 0.98, "bottom": 0.02}[side]
    for mark in sorted(mark for _, marks in events(run) for mark in marks[-MAX_MARKS:]):
        axes.axvline(mark.step, color="0.45", linestyle=":", linewidth=1)
        if mark.step - named >= _LABEL_WIDTH * (end - begin):
            place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "rotation": 90}
            axes.annotate(
                mark.text, (mark.step, height), (-2, 0), ha="right", va=side, fontsize=7, color="0.45", **place
            )
            named = mark.step


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


def step_times(run: LoggedRun, exclude: Collection[int]) -> StepTimes | None:
    """The step durations of a run, without the first step of each start; None if there are none.

    `exclude` contains the first step of each phase, which also includes warm-up.
    """
    steps, seconds = run[DURATION]
    excluded = [*exclude, *(step + 1 for step in resumes(run))]
    included = ~np.isin(steps, excluded) & np.isfinite(seconds)
    known = dict(zip(*batch_sizes(run), strict=True))
    sizes = np.array([known.get(step, 0) for step in steps], dtype=int)
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
    _save(figure, axes, path)


def layer_bars(table: LayerTable, path: Path, title: str) -> None:
    """Plots the numbers of each layer as neighboring bars, as a PNG."""
    figure, axes = _figure("xaxis")
    layers, width = np.arange(len(table.rows)), 0.8 / len(table.columns)
    for number, (name, values) in enumerate(zip(table.columns, zip(*table.rows, strict=True), strict=True)):
        offset = (number - (len(table.columns) - 1) / 2) * width
        axes.bar(layers + offset, values, width, color=COLORS[number % len(COLORS)], label=name)
    axes.set_title(f"{title}, {table.source}")
    axes.set_xlabel(f"by layer: {shorten(table.title, _MAX_TITLE, placeholder=' ...')}", fontsize=8)
    _save(figure, axes, path)


def needle_maps(grids: Sequence[NeedleGrid], path: Path, title: str) -> None:
    """Plots the fraction of pass keys that were found by length and depth, one map for each grid, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(grids), _MAP_COLUMNS)
    num_rows = -(-len(grids) // columns)
    figure = Figure(figsize=(1.5 + 3.2 * columns, 0.8 + 2.8 * num_rows), dpi=120, layout="constrained")
    panels = figure.subplots(num_rows, columns, squeeze=False).ravel()
    colors = {"cmap": "RdYlGn", "vmin": 0.0, "vmax": 1.0}
    maps = [axes.imshow(grid.found, aspect="auto", **colors) for grid, axes in zip(grids, panels, strict=False)]
    for grid, axes in zip(grids, panels, strict=False):
        axes.set_xticks(range(len(grid.lengths)), [f"{length:,}" for length in grid.lengths], fontsize=8)
        axes.set_yticks(range(len(grid.depths)), [f"{depth:.0%}" for depth in grid.depths], fontsize=8)
        axes.set_title(grid.title, fontsize=9)
        axes.set_xlabel("tokens", fontsize=8)
        axes.set_ylabel("depth of the pass key", fontsize=8)
        for place, value in np.ndenumerate(grid.found):
            if np.isfinite(value):
                axes.text(place[1], place[0], f"{value:.2g}", ha="center", va="center", fontsize=8)
    for axes in panels[len(grids) :]:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=10)
    figure.colorbar(maps[0], ax=list(panels), label="found")
    FigureCanvasAgg(figure).print_png(path)


def _figure(*integer_axes: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    for axis in integer_axes:  # steps are integers
        getattr(axes, axis).set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    """Writes a plot, with its legend below, where nothing lies over it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    num_rows = -(-len(axes.get_legend_handles_labels()[0]) // _LEGEND_COLUMNS)
    below = 0.02 + 0.05 * num_rows
    # Margins of a layout engine would draw everything twice.
    figure.subplots_adjust(left=0.115, right=0.98, bottom=below + 0.11, top=0.93)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, below), "bbox_transform": figure.transFigure}
    if num_rows:  # matplotlib warns of a legend of nothing
        axes.legend(ncols=_LEGEND_COLUMNS, frameon=False, fontsize=9, **place)
    FigureCanvasAgg(figure).print_png(path)
