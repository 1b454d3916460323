"""The steps of a run whose updates were skipped, and what the console said about them."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.core.guards import SKIPPED
from jaxlm.observe.page.logged_run import LoggedRun

_MESSAGE = re.compile(r"^step (\d+): (.*); update skipped \(\d+ skipped so far\)\. Batch: ?(.*)$", re.MULTILINE)


class SkippedStep(NamedTuple):
    """A skipped step. Reason and batch are empty if the console output does not have them."""

    step: int
    reason: str
    batch: str


def skipped_steps(run: LoggedRun) -> Sequence[SkippedStep]:
    """The skipped steps of a run, in order, without those that it went back over."""
    if SKIPPED not in run.series:
        return []
    steps, counts = run.series[SKIPPED]
    known = np.isfinite(counts)
    steps, counts = steps[known], counts[known]
    increases = np.diff(counts, prepend=0.0) > 0
    said = {int(step): (reason, batch) for step, reason, batch in _MESSAGE.findall(run.log)}
    return [SkippedStep(step, *said.get(step, ("", ""))) for step in steps[increases].tolist()]
