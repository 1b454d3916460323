"""One chart as a plotly.js figure: the curves of several runs, downsampled, with moving averages and marks."""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxlm.observe.page.downsample import extremes, half_window, smoothed
from jaxlm.observe.page.logged_run import Series

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")  # Okabe and Ito
_MARK = "#777777"
_DASHES = ("solid", "dash", "dot", "dashdot")
_MAX_BUCKETS = 2000  # of all curves of a chart together
_MIN_BUCKETS = 100
_MAX_MARKERS = 60  # points of a curve that shows each of them as a marker
_LARGE = 1e4  # written as 10k
_DIGITS = 7  # float32 has no more
_LAYOUT = {
    "height": 320,
    "margin": {"l": 56, "r": 12, "t": 30, "b": 40},  # plotly.js has its buttons in the upper one
    "hovermode": "x unified",
    "hoverlabel": {"namelength": -1},
    "showlegend": False,  # the page has one beside the chart, where nothing lies over it
    "font": {"family": "system-ui, sans-serif", "size": 12},
    "xaxis": {"title": {"text": "step", "standoff": 6}, "gridcolor": "#e8e8e8", "zeroline": False, "tickformat": ",d"},
    "yaxis": {"gridcolor": "#e8e8e8", "zeroline": False},
    "plot_bgcolor": "white",
}


class Curve(NamedTuple):
    """One metric of one run.

    Attributes:
        run: number of the run on the page.
        metric: number of the metric in the chart.
        label: name in the legend.
    """

    run: int
    metric: int
    label: str
    series: Series


class Mark(NamedTuple):
    """A vertical line at a step."""

    step: int
    text: str


class Key(NamedTuple):
    """A line of the legend, which shows and hides the traces of its group.

    Attributes:
        name: of the curve, and of its group.
        dash: the pattern of the line, as in plotly.js.
    """

    name: str
    color: str
    dash: str


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        title: what it shows.
        unit: of the vertical axis; may be empty.
        figure: `data` and `layout` of plotly.js.
        legend: one line for each curve; empty if there is only one.
        mean_width: number of steps of its moving averages; 1 if it has none.
        num_points: points of its longest curve.
        num_drawn: how many of them are drawn.
    """

    title: str
    unit: str
    figure: Mapping[str, Any]
    legend: Sequence[Key]
    mean_width: int
    num_points: int
    num_drawn: int


def draw(
    title: str,
    unit: str,
    curves: Sequence[Curve],
    marks: Sequence[Mark],
    *,
    num_runs: int,
    is_noisy: bool,
    is_log: bool,
) -> Chart:
    """Draws curves over each other.

    Args:
        is_noisy: whether to draw moving averages over long curves.
        is_log: whether the vertical axis is logarithmic at first.
    """
    buckets = max(_MIN_BUCKETS, _MAX_BUCKETS // len(curves))
    # All curves are drawn at the same steps, so that the values of all of them can be read at each.
    kept = np.unique(np.concatenate([c.series.steps[extremes(c.series.values, buckets)] for c in curves]))
    half = half_window([curve.series.steps for curve in curves]) if is_noisy else 0
    keys = [_key(curve, num_runs) for curve in curves]
    means = [Series(*smoothed(*curve.series, half)) for curve in curves]
    traces = [one for triple in zip(curves, keys, means, strict=True) for one in _traces(*triple, kept)]
    longest = max(curves, key=lambda curve: len(curve.series.steps)).series
    lines = [_line(step, text) for step, text in dict.fromkeys((mark.step, mark.text) for mark in marks)]
    is_large = bool((np.abs(longest.values) >= _LARGE).any())
    layout = _LAYOUT | {
        "yaxis": _LAYOUT["yaxis"]
        | {"type": "log" if is_log else "linear", "exponentformat": "SI" if is_large else "power"},
        "shapes": [line for line, _ in lines],
        "annotations": [name for _, name in lines],
    }
    num_drawn = int(np.isin(longest.steps, kept).sum())
    figure = {"data": traces, "layout": layout}
    mean_width = 2 * half + 1 if any(len(mean.steps) for mean in means) else 1
    return Chart(title, unit, figure, keys if len(keys) > 1 else (), mean_width, len(longest.steps), num_drawn)


def _key(curve: Curve, num_runs: int) -> Key:
    color = COLORS[(curve.metric if num_runs == 1 else curve.run) % len(COLORS)]
    return Key(curve.label, color, "solid" if num_runs == 1 else _DASHES[curve.metric % len(_DASHES)])


def _traces(curve: Curve, key: Key, mean: Series, kept: np.ndarray) -> Iterator[dict[str, Any]]:
    """A curve and its moving average, if that has any points, at the steps that are kept."""
    style = {"color": key.color, "dash": key.dash}
    trace = {"type": "scatter", "legendgroup": key.name, "hovertemplate": "%{y:.5g}"}
    mode = "lines+markers" if len(curve.series.steps) <= _MAX_MARKERS else "lines"
    opacity, width = (0.3, 1) if len(mean.steps) else (1, 1.6)
    look = {
        "mode": mode,
        "opacity": opacity,
        "line": style | {"width": width},
        "marker": {"color": key.color, "size": 5},
    }
    name = html.escape(curve.label)
    yield trace | look | _points(curve.series, kept) | {"name": name}
    if len(mean.steps):
        look = {"mode": "lines", "line": style | {"width": 2}}
        yield trace | look | _points(mean, kept) | {"name": f"{name}, mean"}


def _points(series: Series, kept: np.ndarray) -> dict[str, list[Any]]:
    shown = np.isin(series.steps, kept)
    return {"x": series.steps[shown].tolist(), "y": _numbers(series.values[shown])}


def _line(step: int, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A vertical line and its name."""
    ends = {"x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper"}
    place = {"x": step, "y": 1, "yref": "paper", "xanchor": "right", "yanchor": "top", "textangle": -90}
    name = {"text": html.escape(text), "showarrow": False, "font": {"size": 10, "color": _MARK}, **place}
    return {"type": "line", **ends, "line": {"color": _MARK, "width": 1, "dash": "dot"}}, name


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]
