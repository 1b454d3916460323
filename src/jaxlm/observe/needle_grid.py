"""The grids of the evaluation `needle`: how many pass keys were found, by the length of the text and their depth in it."""

import re
from typing import NamedTuple

import numpy as np

from jaxlm.core.values.logged import EVAL_PREFIX
from jaxlm.observe.logged_run import LoggedRun
from jaxlm.observe.phase_history import phase_history

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
        """What it shows."""
        return f"{self.name.removeprefix(EVAL_PREFIX)}, {f'{self.phase}, ' if self.phase else ''}step {self.step}"


def is_cell(metric: str) -> bool:
    """Whether a metric is a cell of a grid."""
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
