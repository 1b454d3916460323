"""Counts the updates that were skipped in a row, and asks to go back when there are too many.

Source: the remedy for loss spikes in Chowdhery et al. 2022, PaLM (arXiv:2204.02311), section 5.1: continue from an earlier
checkpoint and skip the batches that were read since.
"""

from dataclasses import replace

from jaxlm.core.guards import RewindRule
from jaxlm.core.types import StepInfo
from jaxlm.engine.checkpoint.manager import Saver
from jaxlm.engine.outcome import Rewind


class BadStreak:
    """The current streak of skipped updates. Its length is part of the saved history, so it survives a kill.

    All processes see the same metrics in the same order, so they go back at the same step.
    """

    def __init__(self, rule: RewindRule | None, saver: Saver, *, skipped: int):
        """Args:
        rule: None never goes back and counts nothing.
        skipped: number of updates skipped in the run so far.
        """
        self._rule = rule
        self._saver = saver
        self._skipped = skipped

    def after(self, info: StepInfo) -> Rewind | None:
        """Counts a finished step. Returns how to go back if the streak is too long."""
        if self._rule is None:
            return None
        skipped = int(info.metrics["train/skipped_steps"])
        history = self._saver.history
        length = history.bad_steps + 1 if skipped > self._skipped else 0
        self._skipped = skipped
        if length != history.bad_steps:
            self._saver.history = replace(history, bad_steps=length)
        return Rewind(info.step - length + 1, info.step) if length >= self._rule.after else None
