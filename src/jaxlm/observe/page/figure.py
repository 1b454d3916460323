"""One chart as a plotly.js figure: the curves of several runs, downsampled, with moving averages and marks."""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxlm.observe.page.downsample import extremes, smoothed
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
    "margin": {"l": 56, "r": 12, "t": 10, "b": 40},
    "hovermode": "x unified",
    "hoverlabel": {"namelength": -1},
    "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "tracegroupgap": 0},
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


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        title: what it shows.
        unit: of the vertical axis; may be empty.
        figure: `data` and `layout` of plotly.js.
        num_points: points of its longest curve.
        num_drawn: how many of them are drawn.
    """

    title: str
    unit: str
    figure: Mapping[str, Any]
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
        is_noisy: whether to draw a moving average over long curves.
        is_log: whether the vertical axis is logarithmic at first.
    """
    buckets = max(_MIN_BUCKETS, _MAX_BUCKETS // len(curves))
    # All curves are drawn at the same steps, so that the values of all of them can be read at each.
    kept = np.unique(np.concatenate([c.series.steps[extremes(c.series.values, buckets)] for c in curves]))
    traces = [trace for curve in curves for trace in _traces(curve, kept, num_runs, is_noisy)]
    longest = max(curves, key=lambda curve: len(curve.series.steps)).series
    lines = [_line(step, text) for step, text in dict.fromkeys((mark.step, mark.text) for mark in marks)]
    is_large = bool((np.abs(longest.values) >= _LARGE).any())
    layout = _LAYOUT | {
        "showlegend": sum(trace["showlegend"] for trace in traces) > 1,
        "yaxis": _LAYOUT["yaxis"]
        | {"type": "log" if is_log else "linear", "exponentformat": "SI" if is_large else "power"},
        "shapes": [line for line, _ in lines],
        "annotations": [name for _, name in lines],
    }
    num_drawn = int(np.isin(longest.steps, kept).sum())
    return Chart(title, unit, {"data": traces, "layout": layout}, len(longest.steps), num_drawn)


def _traces(curve: Curve, kept: np.ndarray, num_runs: int, is_noisy: bool) -> Iterator[dict[str, Any]]:
    steps, values = curve.series
    color = COLORS[(curve.metric if num_runs == 1 else curve.run) % len(COLORS)]
    dash = "solid" if num_runs == 1 else _DASHES[curve.metric % len(_DASHES)]
    mean_steps, means, width = smoothed(steps, values)
    has_mean = is_noisy and width > 1
    style = {"color": color, "dash": dash, "width": 1 if has_mean else 1.6}
    mode = "lines+markers" if len(steps) <= _MAX_MARKERS else "lines"
    trace = {"type": "scatter", "mode": mode, "line": style, "legendgroup": curve.label}
    shown = np.isin(steps, kept)
    name = html.escape(curve.label)
    points = {"x": steps[shown].tolist(), "y": _numbers(values[shown]), "name": name, "opacity": 0.3 if has_mean else 1}
    points["showlegend"] = not has_mean  # the mean shows and hides both
    yield trace | points | {"marker": {"color": color, "size": 5}, "hovertemplate": "%{y:.5g}"}
    if has_mean:
        shown = np.isin(mean_steps, kept)
        points = {"x": mean_steps[shown].tolist(), "y": _numbers(means[shown]), "name": f"{name}, mean of {width}"}
        points["showlegend"] = True
        yield trace | points | {"mode": "lines", "line": style | {"width": 2}, "hovertemplate": "%{y:.5g}"}


def _line(step: int, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A vertical line and its name."""
    ends = {"x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper"}
    place = {"x": step, "y": 1, "yref": "paper", "xanchor": "right", "yanchor": "top", "textangle": -90}
    name = {"text": html.escape(text), "showarrow": False, "font": {"size": 10, "color": _MARK}, **place}
    return {"type": "line", **ends, "line": {"color": _MARK, "width": 1, "dash": "dot"}}, name


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]
