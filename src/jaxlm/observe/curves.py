"""Curves as all pictures show them (colors, moving averages, the points of a cell), and the grids of needles."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.core.values.logged import EVAL_PREFIX
from jaxlm.observe.events import phase_history
from jaxlm.observe.logged_run import LoggedRun, Series

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")  # Okabe and Ito
BAND_OPACITY = 0.16  # of the background of some steps
_FIRST_BAND = 2  # the colors before are those of the curves on it
_SMOOTHING_WIDTH = 0.02  # width of the moving averages, as a fraction of the steps of the longest curve
_MAX_HALF_WIDTH = 500
_MIN_POINTS = 50  # of a curve that has a moving average


def band_colors(names: Sequence[str]) -> dict[str, str]:
    """Name -> color of the background of its steps, in the order in which the names appear."""
    return {name: COLORS[(_FIRST_BAND + i) % len(COLORS)] for i, name in enumerate(dict.fromkeys(names))}


def extremes(values: np.ndarray, num_buckets: int) -> np.ndarray:
    """Indices of the points to draw: of each bucket of equally many points, the lowest, the highest and the first that is not
    finite; of the whole, the first and the last. All points if they are at most twice as many as the buckets.
    """
    num = len(values)
    if num <= 2 * num_buckets:
        return np.arange(num)
    width = -(-num // num_buckets)
    rows = -(-num // width)
    padded = np.full(rows * width, np.nan)
    padded[:num] = np.where(np.isfinite(values), values, np.nan)
    buckets = padded.reshape(rows, width)
    missing = np.isnan(buckets)
    lowest = np.where(missing, np.inf, buckets).argmin(axis=1)
    highest = np.where(missing, -np.inf, buckets).argmax(axis=1)
    starts = np.arange(rows) * width
    first_missing = (starts + missing.argmax(axis=1))[missing.any(axis=1)]
    chosen = np.concatenate([starts + lowest, starts + highest, first_missing, [0, num - 1]])
    return np.unique(chosen[chosen < num])


def half_window(curves: Sequence[np.ndarray]) -> int:
    """Half the width in steps of the moving averages of a chart: one for all of its curves, or two runs with the same noise
    would look different. 0 for no averages.

    A hundredth of the longest curve, at most a tenth of the shortest one that is long enough to have an average.

    Args:
        curves: the steps of each one.
    """
    spans = [int(np.ptp(steps)) + 1 for steps in curves if len(steps) >= _MIN_POINTS]
    if not spans:
        return 0
    return min(round(max(spans) * _SMOOTHING_WIDTH / 2), min(spans) // 10, _MAX_HALF_WIDTH)


def smoothed(series: Series, half: int) -> Series:
    """The mean of the finite values within `half` steps of each step, where the curve has as many steps on both sides.

    Empty if no mean has more than one value.
    """
    steps, values = series
    order = np.argsort(steps, kind="stable")  # a damaged file may have any order
    order = order[np.isfinite(values[order])]
    steps, values = steps[order], values[order]
    if not len(steps):
        return Series(steps, values)
    centers = np.flatnonzero((steps - half >= steps[0]) & (steps + half <= steps[-1]))
    begins = np.searchsorted(steps, steps[centers] - half)
    ends = np.searchsorted(steps, steps[centers] + half, side="right")
    counts = ends - begins
    if not (counts > 1).any():
        return Series(steps[:0], values[:0])
    # Sums of each window by itself: differences of running sums lose everything behind one huge value.
    sums = np.add.reduceat(np.append(values, 0.0), np.stack([begins, ends], axis=1).ravel())[::2]
    return Series(steps[centers], sums / counts)


_CELL = re.compile(rf"({re.escape(EVAL_PREFIX)}.+)/(\d+)/depth_([\d.]+)")


class NeedleGrid(NamedTuple):
    """The last grid that an evaluation has measured in a phase.

    Attributes:
        name: the metrics before the length, such as `eval/needle`.
        phase: empty for a run of a single phase.
        step: when it was measured.
        lengths, depths: ascending.
        found: fraction of pass keys, [depth, length]; NaN where nothing was measured.
    """

    name: str
    phase: str
    step: int
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    found: np.ndarray

    @property
    def title(self) -> str:
        """The metric, the phase and the step that it shows."""
        return f"{self.name.removeprefix(EVAL_PREFIX)}, {f'{self.phase}, ' if self.phase else ''}step {self.step}"


def is_cell(metric: str) -> bool:
    """Tells whether a metric is a cell of a grid."""
    return _CELL.fullmatch(metric) is not None


def needle_grids(run: LoggedRun) -> list[NeedleGrid]:
    """The grids at the end of each phase, or as far as it is."""
    grids: list[NeedleGrid] = []
    cells: dict[str, dict[tuple[float, int], str]] = {}
    for metric in run.series:
        if match := _CELL.fullmatch(metric):
            cells.setdefault(match[1], {})[float(match[3]), int(match[2])] = metric
    phases = [(one.name, one.start, one.end) for one in phase_history(run)] if cells else []
    for name, of_name in cells.items():
        depths = tuple(sorted({depth for depth, _ in of_name}))
        lengths = tuple(sorted({length for _, length in of_name}))
        for phase, start, end in phases or [("", -1, np.inf)]:
            steps = np.concatenate([run[metric].steps for metric in of_name.values()])
            steps = steps[(steps > start) & (steps <= end)]
            if not len(steps):
                continue
            found = np.full((len(depths), len(lengths)), np.nan)
            for (depth, length), metric in of_name.items():
                at = np.flatnonzero(run[metric].steps == steps.max())
                if len(at):
                    found[depths.index(depth), lengths.index(length)] = run[metric].values[at[-1]]
            grids.append(NeedleGrid(name, phase, int(steps.max()), lengths, depths, found))
    return grids
