"""The tables and texts of a page: report card, CORE, needles, layers, where runs differ, skipped steps, samples and more."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import yaml

from jaxlm.core.values.logged import (
    BEST_BPB,
    EVAL_BPB,
    EVAL_CORE,
    EVAL_LOSS,
    GLOBAL_STEP,
    MFU,
    PROGRESS,
    SMOOTHED_LOSS,
    TOKENS_PER_SECOND,
    TOTAL_GFLOPS,
    TOTAL_TOKENS,
    TRAIN_LOSS,
    TRAINING_TIME,
    Activity,
)
from jaxlm.observe.curves import COLORS, needle_grids
from jaxlm.observe.decision_notes import described
from jaxlm.observe.events import layer_tables, phase_history, phase_table, resumes, skipped_steps
from jaxlm.observe.ledger import IDLE
from jaxlm.observe.logged_run import LoggedRun, Series

ABSENT = "–"
_MAX_KEYS = 5000
_MAX_SKIPPED = 100  # shown of each run
_MAX_DECISIONS = 200  # shown of each run
_MAX_PROMPTS = 12  # shown of each run
_MAX_STEPS = 30  # samples shown of each prompt
_MAX_COMPLETION_STEPS = 12  # with completions shown of each run
_MAX_COMPLETIONS = 4  # shown of each step
_MAX_CHARACTERS = 4000  # of a text
_MAX_RESUMED = 8
_PLAN = ("devices", "model", "batch", "precision", "starts from")
_ENVIRONMENT = ("command", "system")
_TIMES = {
    Activity.STEP: "time in steps",
    Activity.ROLLOUT: "time in rollouts",
    Activity.ANNOTATION: "time in annotation",
    Activity.DATA: "waiting for batches",
    Activity.EVAL: "time in evaluations",
    Activity.SAVE: "time in saves",
    Activity.BRANCH: "time in branches",
}
_CORE_TASK = re.compile(re.escape(EVAL_CORE) + "/([^/]+)")


class Table(NamedTuple):
    """A table. The first cell of each row is its name."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Newest(NamedTuple):
    """What has happened in a run, the newest last.

    Attributes:
        rows: of each event, what its table shows.
        left_out: how many are not in `rows`.
    """

    run: str
    rows: Sequence[Any]
    left_out: int

    @staticmethod
    def of(run: str, rows: Sequence[Any], most: int) -> "Newest":
        return Newest(run, rows[-most:], max(0, len(rows) - most))


class Samples(NamedTuple):
    """The continuations of one prompt, newest first.

    Attributes:
        weights: which weights wrote them, `eval` or the name of an average.
        texts: (step, text).
        left_out: how many are not in `texts`.
    """

    run: str
    weights: str
    prompt: str
    texts: Sequence[tuple[int, str]]
    left_out: int


class Completions(NamedTuple):
    """Completions of a run with their rewards, newest first.

    Attributes:
        name: `train`, or the name of the evaluation that asked for them.
        head: the columns after the texts: the rewards, and the advantage.
        rows: (step, prompt, completion, values of the columns).
        left_out: how many are not in `rows`.
    """

    run: str
    name: str
    head: Sequence[str]
    rows: Sequence[tuple[int, str, str, Sequence[str]]]
    left_out: int


class Layers(NamedTuple):
    """Numbers of every layer that a surgery has measured.

    Attributes:
        rows: of each layer, (number as text, length of its bar in percent of the longest).
    """

    run: str
    source: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[tuple[str, float]]]


class Needles(NamedTuple):
    """A grid of the evaluation `needle`.

    Attributes:
        rows: (depth, fraction found at each length as text and as color).
    """

    run: str
    title: str
    lengths: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]


class Share(NamedTuple):
    """A part of a run's wall time. Attributes: fraction: of the whole."""

    activity: str
    seconds: float
    fraction: float
    color: str


def report_card(runs: Sequence[LoggedRun], price_per_hour: float | None = None) -> Table:
    """Shows what each run trains and with what, how far it is, its newest metrics, and its cost.

    Args:
        price_per_hour: of the machines of each run together; None shows no cost.
    """
    columns = [dict(_results(run, price_per_hour)) for run in runs]
    names = list(dict.fromkeys(name for one in columns for name in one))
    return Table([run.name for run in runs], [[name, *(one.get(name, ABSENT) for one in columns)] for name in names])


def core_table(runs: Sequence[LoggedRun]) -> Table | None:
    """The newest accuracy on each task of CORE, as it is and centered, and CORE itself; None if no run has measured it."""
    matches = (_CORE_TASK.fullmatch(name) for run in runs for name in run.series)
    tasks = list(dict.fromkeys(match[1] for match in matches if match))
    if not tasks:
        return None
    columns = [(run, ending, label) for run in runs for ending, label in (("/accuracy", "accuracy"), ("", "centered"))]
    rows = [
        [task, *(_number(run.latest(f"{EVAL_CORE}/{task}{ending}")) for run, ending, _ in columns)] for task in tasks
    ]
    if any(EVAL_CORE in run.series for run in runs):
        rows.append(["CORE", *("" if ending else _number(run.latest(EVAL_CORE)) for run, ending, _ in columns)])
    return Table([label if len(runs) == 1 else f"{run.name}: {label}" for run, _, label in columns], rows)


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4f}"


def _results(run: LoggedRun, price_per_hour: float | None) -> Iterator[tuple[str, str]]:
    for name, value in run.start_table():
        if name in _PLAN or name.startswith("phase "):
            yield name, value
    for name in _ENVIRONMENT:
        if name in run.environment:
            yield name, run.environment[name]
    step, progress = run.latest(GLOBAL_STEP), run.latest(PROGRESS)
    if step is not None:
        yield "steps", f"{step:,.0f}" + (f" of {step / progress:,.0f}" if progress else "")
    for name, label in ((TRAIN_LOSS, "training loss, last step"), (SMOOTHED_LOSS, "training loss, smoothed")):
        if name in run.series:
            yield label, newest(run.series[name])
    for name, label in ((EVAL_LOSS, "validation loss"), (EVAL_BPB, "bits per byte")):
        if name in run.series:
            yield label, newest(run.series[name]) + _lowest(run.series[name])
    for name, label in ((BEST_BPB, "best bits per byte"), (EVAL_CORE, "CORE")):
        if name in run.series:
            yield label, newest(run.series[name])
    if (tokens := run.latest(TOTAL_TOKENS)) is not None:
        yield "tokens", f"{tokens:,.0f}"
    if gflops := run.latest(TOTAL_GFLOPS):
        yield "model FLOPs", f"{gflops * 1e9:.4g}"
    if (seconds := run.latest(TRAINING_TIME)) is not None:
        yield "training time, all starts", f"{seconds:,.1f} s"
    for name, label in ((TOKENS_PER_SECOND, "tokens per second"), (MFU, "MFU")):
        if run.latest(name) is not None:
            median = float(np.nanmedian(run.series[name].values))
            yield f"{label}, median", f"{median:,.0f}" if median >= 10 else f"{median:.3g}"
    # The metrics of a step know neither what came after the last one nor what was lost: times are those of the ledger.
    if run.goodput:
        yield "wall time", f"{sum(run.goodput.values()):,.1f} s"
    for activity, label in _TIMES.items():
        if run.goodput.get(activity):
            yield label, f"{run.goodput[activity]:,.1f} s"
    if skipped := skipped_steps(run):
        yield "skipped steps", f"{len(skipped):,}"
    if steps := resumes(run):
        earlier = f" ({len(steps) - _MAX_RESUMED:,} earlier ones are left out)" if len(steps) > _MAX_RESUMED else ""
        yield "resumed from step", ", ".join(f"{step:,.0f}" for step in steps[-_MAX_RESUMED:]) + earlier
    if price_per_hour is not None and run.goodput:
        hours = sum(seconds for activity, seconds in run.goodput.items() if activity != IDLE) / 3600
        yield "cost", f"{hours * price_per_hour:,.2f} ({hours:,.2f} hours at {price_per_hour:g} per hour)"


def newest(series: Series) -> str:
    """The last value of a metric. If it is not finite, the last finite one too."""
    if not len(series.values):
        return "none"
    finite = np.flatnonzero(np.isfinite(series.values))
    if not finite.size:
        return "never finite"
    text = f"{series.values[finite[-1]]:.4f}"
    is_last = finite[-1] == len(series.values) - 1
    return text if is_last else f"not finite; {text} at step {series.steps[finite[-1]]:,}"


def _lowest(series: Series) -> str:
    finite = np.isfinite(series.values)
    if not finite.any():
        return ""
    lowest = int(np.nanargmin(np.where(finite, series.values, np.nan)))
    return f" (lowest {series.values[lowest]:.4f} at step {series.steps[lowest]:,})"


def phases(runs: Sequence[LoggedRun]) -> list[tuple[str, Table]]:
    """The phases of each run that has several."""
    histories = [(run.name, phase_history(run)) for run in runs]
    return [(name, Table(*phase_table(history))) for name, history in histories if history]


def differences(facts: Sequence[Mapping[str, str]], runs: Sequence[LoggedRun]) -> Table:
    """The rows in which the runs differ."""
    names = dict.fromkeys(name for one in facts for name in one)
    rows = [[name, *(one.get(name, ABSENT) for one in facts)] for name in names]
    return Table([run.name for run in runs], [row for row in rows if len(set(row[1:])) > 1])


def config_values(text: str) -> dict[str, str]:
    """The values of a configuration by dotted key, as they are written; empty if the text is not YAML."""
    try:
        # This loader makes only strings, lists and dictionaries.
        tree = yaml.load(text, getattr(yaml, "CBaseLoader", yaml.BaseLoader))
        return dict(islice(_flat("", tree), _MAX_KEYS))
    except (yaml.YAMLError, RecursionError):
        return {}


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for number, item in enumerate(value):
            yield from _flat(f"{path}.{number}", item)
    elif path:
        yield path, f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def skipped(runs: Sequence[LoggedRun]) -> list[Newest]:
    """The newest skipped steps of each run that has some, as `SkippedStep`."""
    return [Newest.of(run.name, steps, _MAX_SKIPPED) for run in runs if (steps := skipped_steps(run))]


def decisions(runs: Sequence[LoggedRun]) -> list[Newest]:
    """(step, controller, what it decided) of the newest decisions of each run whose controllers made some."""
    again = lambda one: "; the run has been here again since" if one.is_superseded and not one.is_rollback else ""  # noqa: E731
    shown = [Newest.of(run.name, run.decisions, _MAX_DECISIONS) for run in runs if run.decisions]
    row = lambda one: (one.step, one.controller, described(one.note) + again(one))  # noqa: E731
    return [newest._replace(rows=list(map(row, newest.rows))) for newest in shown]


def layers(runs: Sequence[LoggedRun]) -> list[Layers]:
    """The tables of numbers by layer of each run."""
    return [
        Layers(run.name, table.source, table.title, table.columns, _with_bars(table.rows))
        for run in runs
        for table in layer_tables(run)
    ]


def needles(runs: Sequence[LoggedRun]) -> list[Needles]:
    """The grids of the evaluation `needle`, from red (nothing found) to green."""
    cell = lambda x: (f"{x:.2f}", f"hsl({120 * x:.0f} 65% 70%)") if np.isfinite(x) else (ABSENT, "none")  # noqa: E731
    return [
        Needles(
            run.name,
            grid.title,
            [f"{length:,}" for length in grid.lengths],
            [
                (f"{depth:.0%}", list(map(cell, row)))
                for depth, row in zip(grid.depths, grid.found.tolist(), strict=True)
            ],
        )
        for run in runs
        for grid in needle_grids(run)
    ]


def _with_bars(rows: Sequence[Sequence[float]]) -> list[list[tuple[str, float]]]:
    longest = max((x for row in rows for x in row if np.isfinite(x)), default=0.0)
    length = lambda x: 100 * max(x, 0.0) / longest if np.isfinite(x) and longest > 0 else 0.0  # noqa: E731
    return [[(f"{x:.4f}", length(x)) for x in row] for row in rows]


def samples(runs: Sequence[LoggedRun]) -> tuple[list[Samples], int]:
    """The samples of each run by prompt, and the number of prompts that are left out."""
    by_prompt: dict[tuple[str, str, str], dict[int, str]] = {}
    for run in runs:
        for one in run.samples:
            by_prompt.setdefault((run.name, one["name"], one["prompt"]), {})[one["step"]] = one["text"]
    shown: dict[str, int] = {}
    groups = []
    for (run, weights, prompt), texts in by_prompt.items():
        shown[run] = shown.get(run, 0) + 1
        if shown[run] <= _MAX_PROMPTS:
            steps = sorted(texts, reverse=True)
            kept = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, _MAX_STEPS).round().astype(int))]
            entries = [(step, _shortened(texts[step])) for step in kept]
            groups.append(Samples(run, weights, _shortened(prompt), entries, len(steps) - len(kept)))
    return groups, len(by_prompt) - len(groups)


def completions(runs: Sequence[LoggedRun]) -> list[Completions]:
    """The first completions of some steps of each run, from its first to its last."""
    by_name: dict[tuple[str, str], dict[int, list[Mapping[str, Any]]]] = {}
    for run in runs:
        for one in run.completions:
            by_name.setdefault((run.name, one["name"]), {}).setdefault(one["step"], []).append(one)
    groups = []
    for (run_name, name), by_step in by_name.items():
        steps = sorted(by_step, reverse=True)
        kept = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, _MAX_COMPLETION_STEPS).round().astype(int))]
        shown = [one for step in kept for one in by_step[step][:_MAX_COMPLETIONS]]
        rewards = list(dict.fromkeys(name for one in shown for name in one["rewards"]))
        rows = [
            (one["step"], _shortened(one["prompt"]), _shortened(one["completion"]), _values(one, rewards))
            for one in shown
        ]
        left_out = sum(map(len, by_step.values())) - len(rows)
        groups.append(Completions(run_name, name, ["reward", *rewards, "advantage"], rows, left_out))
    return groups


def _values(completion: Mapping[str, Any], rewards: Sequence[str]) -> list[str]:
    parts = [completion["rewards"].get(name) for name in rewards]
    values = (completion["reward"], *parts, completion["advantage"])
    return [ABSENT if value is None else f"{value:.3f}" for value in values]


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} …"


def goodput(seconds: Mapping[str, float]) -> list[Share]:
    """The parts of a stacked bar: what the wall time of a run was spent on. Args: seconds: activity -> seconds."""
    total = sum(seconds.values())
    spent = {activity: one for activity, one in seconds.items() if one > 0}
    return [
        Share(activity, one, one / total, COLORS[number % len(COLORS)])
        for number, (activity, one) in enumerate(spent.items())
    ]
