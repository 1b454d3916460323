"""Writes the page of one or several runs, with its charts: one HTML file that needs no network."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.core.guards import GRADIENT_NORM
from jaxlm.core.redaction import write_text
from jaxlm.core.safe_io import atomic_file
from jaxlm.core.values.logged import (
    BEST_BPB,
    DURATION,
    EVAL_LOSS,
    EVAL_PREFIX,
    GLOBAL_STEP,
    LEARNING_RATE,
    PROGRESS,
    RESUMED_FROM,
    TOKENS_PER_SECOND,
    TRAIN_LOSS,
)
from jaxlm.observe.curves import BAND_OPACITY, COLORS, band_colors, extremes, half_window, is_cell, smoothed
from jaxlm.observe.decision_notes import Band
from jaxlm.observe.events import MAX_MARKS, Mark, batch_sizes, events, strategies
from jaxlm.observe.logged_run import LoggedRun, Series
from jaxlm.observe.page.sections import (
    completions,
    config_values,
    core_table,
    decisions,
    differences,
    goodput,
    layers,
    needles,
    phases,
    report_card,
    samples,
    skipped,
)

_MAX_FURTHER = 40
_NO_CURVES = {RESUMED_FROM, GLOBAL_STEP, PROGRESS}
_BATCH = "batch size"
_DASHES = ("none", "7 3", "2 3", "7 3 2 3")  # as SVG has them
_MAX_BUCKETS = 2000  # of all curves of a chart together
_MIN_BUCKETS = 100
_DIGITS = 7  # float32 has no more


class _Kind(NamedTuple):
    """A chart of the metrics whose whole name matches a regular expression."""

    title: str
    unit: str
    metrics: str
    is_noisy: bool = False
    is_log: bool = False
    shows_strategies: bool = False


_KINDS = (
    _Kind("Loss", "nats per token", f"{TRAIN_LOSS}|{EVAL_LOSS}", is_noisy=True, shows_strategies=True),
    _Kind("Validation losses of parts and averages", "nats per token", f"{EVAL_PREFIX}.+/loss"),
    _Kind("Bits per byte", "", f"{EVAL_PREFIX}(.+/)?bpb|{BEST_BPB}"),
    _Kind("CORE", "", f"{EVAL_PREFIX}(.+/)?core"),
    _Kind("Tasks of CORE, centered", "", f"{EVAL_PREFIX}(.+/)?core/[^/]+"),
    _Kind("Tasks of CORE, accuracy", "", f"{EVAL_PREFIX}(.+/)?core/[^/]+/accuracy"),
    _Kind("Needle in a haystack, by length", "found", f"{EVAL_PREFIX}(.+/)?needle/([0-9]+|accuracy)"),
    _Kind("Learning rate", "", f"{LEARNING_RATE}(/.*)?"),
    _Kind("Batch size", "sequences", _BATCH),
    _Kind("Gradient norm", "", GRADIENT_NORM, is_noisy=True, is_log=True),
    _Kind("Throughput", "tokens per second", TOKENS_PER_SECOND, is_noisy=True),
    _Kind("Step time", "seconds", DURATION),
)

_Metrics = Sequence[Mapping[str, Series]]


class Key(NamedTuple):
    """A line of the legend, which shows and hides the curve and its moving average."""

    name: str
    color: str
    dash: str


class Chart(NamedTuple):
    """A chart.

    Attributes:
        unit: of the vertical axis; may be empty.
        keys: the legend, one line for each curve.
        figure: what the page's script draws: `curves`, with the number of their key; `marks`; `bands` of steps, with their
            color; whether the axis is `log`.
        bands: (name, color) of the bands.
        mean_width: number of steps of its moving averages; 1 if it has none.
        num_points: points of its longest curve.
        num_drawn: how many of them are drawn.
    """

    title: str
    unit: str
    keys: Sequence[Key]
    figure: Mapping[str, Any]
    bands: Sequence[tuple[str, str]]
    mean_width: int
    num_points: int
    num_drawn: int


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
    sizes = [batch_sizes(run) for run in runs]
    metrics: _Metrics = [run.series for run in runs]
    if len(np.unique(np.concatenate([one.values for one in sizes]))) > 1:  # otherwise one number says it for all
        shown_sizes = [{_BATCH: one} if len(one.steps) else {} for one in sizes]
        metrics = [{**series, **own} for series, own in zip(metrics, shown_sizes, strict=True)]
    names = sorted({name for one in metrics for name in one if not is_cell(name)} - _NO_CURVES)
    rest = [name for name in names if not any(re.fullmatch(kind.metrics, name) for kind in _KINDS)]
    evals = [name for name in rest if name.startswith(EVAL_PREFIX)]
    single = [_Kind(name, "", re.escape(name)) for name in (*evals, *(n for n in rest if n not in evals))]
    end = len(evals) + _MAX_FURTHER
    lines = [(run.name, kind, marks) for run in runs for kind, marks in events(run)]
    shown = [mark for _, _, marks in lines for mark in marks[-MAX_MARKS:]]
    return Charts(
        list(_drawn([*_KINDS, *single[: len(evals)]], runs, metrics, shown)),
        list(_drawn(single[len(evals) : end], runs, metrics, shown)),
        [kind.title for kind in single[end:]],
        [
            (run, f"{len(marks) - MAX_MARKS:,} earlier {kind} have no line in the charts")
            for run, kind, marks in lines
            if len(marks) > MAX_MARKS
        ],
    )


def _drawn(
    kinds: Sequence[_Kind], runs: Sequence[LoggedRun], metrics: _Metrics, marks: Sequence[Mark]
) -> Iterator[Chart]:
    for kind in kinds:
        names = sorted({name for one in metrics for name in one if re.fullmatch(kind.metrics, name)}, reverse=True)
        curves = {
            _key(runs, run, name, number, len(names)): one[name]
            for run, one in enumerate(metrics)
            for number, name in enumerate(names)
            if name in one
        }
        if curves:
            # The bands of several runs would lie over each other.
            bands = strategies(runs[0]) if kind.shows_strategies and len(runs) == 1 else []
            yield _chart(kind, curves, marks, bands)


def _key(runs: Sequence[LoggedRun], run: int, metric: str, number: int, num_metrics: int) -> Key:
    """Runs differ in their color, and metrics of several runs in their dashes. Args: number: of the metric in its chart."""
    if len(runs) == 1:
        return Key(metric, COLORS[number % len(COLORS)], _DASHES[0])
    name = runs[run].name if num_metrics == 1 else f"{runs[run].name}: {metric}"
    return Key(name, COLORS[run % len(COLORS)], _DASHES[number % len(_DASHES)])


def _chart(kind: _Kind, curves: Mapping[Key, Series], marks: Sequence[Mark], bands: Sequence[Band]) -> Chart:
    buckets = max(_MIN_BUCKETS, _MAX_BUCKETS // len(curves))
    # All curves are drawn at the same steps, so that the values of all of them can be read at each.
    kept = np.unique(np.concatenate([one.steps[extremes(one.values, buckets)] for one in curves.values()]))
    half = half_window([one.steps for one in curves.values()]) if kind.is_noisy else 0
    drawn = []
    for number, (key, series) in enumerate(curves.items()):
        mean = smoothed(series, half)
        has_mean = len(mean.steps) > 0
        for name, shown, faint in ((key.name, series, has_mean), (f"{key.name}, mean", mean, False))[: 1 + has_mean]:
            style = {"key": number, "color": key.color, "dash": key.dash, "faint": faint}
            drawn.append({"name": name, **style, **_points(shown, kept)})
    colors = band_colors([band.name for band in bands])
    longest = max((one.steps for one in curves.values()), key=len)
    return Chart(
        kind.title,
        kind.unit,
        list(curves),
        {
            "curves": drawn,
            "marks": sorted(set(marks)),
            "bands": [(band.begin, band.end, colors[band.name]) for band in bands],
            "opacity": BAND_OPACITY,
            "log": kind.is_log,
        },
        list(colors.items()),
        2 * half + 1 if any(curve["faint"] for curve in drawn) else 1,
        len(longest),
        int(np.isin(longest, kept).sum()),
    )


def _points(series: Series, kept: np.ndarray) -> dict[str, list[Any]]:
    shown = np.isin(series.steps, kept)
    values = [float(f"{y:.{_DIGITS}g}") if np.isfinite(y) else None for y in series.values[shown].tolist()]
    return {"x": series.steps[shown].tolist(), "y": values}


_TEMPLATE = "page.html.j2"


def write_page(runs: Sequence[LoggedRun], path: Path, price_per_hour: float | None = None) -> None:
    """Writes the page of some runs, atomically.

    Args:
        price_per_hour: of the machines of each run together, for the report card; None shows no cost.

    Raises:
        OSError: the file cannot be written.
    """
    text = render(runs, price_per_hour)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as unfinished:
        write_text(unfinished, text)


def render(runs: Sequence[LoggedRun], price_per_hour: float | None = None) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Texts of samples, configurations and logs are not to be trusted.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(**_content(runs, price_per_hour))


def _content(runs: Sequence[LoggedRun], price_per_hour: float | None) -> Mapping[str, Any]:
    shown = charts(runs)
    several = len(runs) > 1
    shown_samples, num_prompts_left_out = samples(runs)
    configs = [config_values(run.config) for run in runs]
    environments = [run.environment for run in runs]
    return {
        "runs": runs,
        "title": ", ".join(run.name for run in runs),
        "report_card": report_card(runs, price_per_hour),
        "core": core_table(runs),
        "needles": needles(runs),
        "unread": [(run.name, sentence) for run in runs for sentence in run.unread],
        **shown._asdict(),
        "figures": {f"chart-{n}": chart.figure for n, chart in enumerate((*shown.main, *shown.further))},
        "goodput": [(run.name, goodput(run.goodput)) for run in runs if run.goodput],
        "skipped": skipped(runs),
        "decisions": decisions(runs),
        "layers": layers(runs),
        "phases": phases(runs),
        "samples": shown_samples,
        "num_prompts_left_out": num_prompts_left_out,
        "completions": completions(runs),
        "config_differences": differences(configs, runs) if several else None,
        "environment_differences": differences(environments, runs) if several else None,
    }
