"""Counts the updates that were skipped in a row. If there are too many, the run goes back or ends.

Source: the remedy for loss spikes in Chowdhery et al. 2022, PaLM (arXiv:2204.02311), section 5.1: continue from an earlier
checkpoint and skip the batches that were read since.
"""

from dataclasses import replace

from jaxlm.core.guards import SKIPPED, RewindRule
from jaxlm.core.types import StepInfo
from jaxlm.engine.checkpoint.manager import Saver
from jaxlm.engine.outcome import Rewind


class SkippedStepsError(Exception):
    """Too many updates in a row were skipped, and the run does not go back."""


class BadStreak:
    """The current streak of skipped updates. Its length is part of the saved history, so it survives a kill.

    All processes see the same metrics in the same order, so they go back, or end, at the same step.
    """

    def __init__(self, rule: RewindRule | None, limit: int | None, saver: Saver, *, skipped: int):
        """Args:
        rule: None never goes back.
        limit: length of a streak that ends the run; None never ends it.
        skipped: number of updates skipped in the run so far.
        """
        self._rule = rule
        self._limit = limit
        self._saver = saver
        self._skipped = skipped

    def after(self, info: StepInfo) -> Rewind | None:
        """Counts a finished step. Returns how to go back if the streak is too long.

        Raises:
            SkippedStepsError: the streak is as long as the limit.
        """
        skipped = int(info.metrics[SKIPPED])
        history = self._saver.history
        length = history.bad_steps + 1 if skipped > self._skipped else 0
        self._skipped = skipped
        if length != history.bad_steps:
            self._saver.history = replace(history, bad_steps=length)
        if self._rule is not None and length >= self._rule.after:
            return Rewind(info.step - length + 1, info.step)
        if self._limit is not None and length >= self._limit:
            raise SkippedStepsError(
                f"step {info.step}: the updates of {length} steps in a row were skipped (trainer.crash_after_skipped:"
                f" {self._limit}). The weights have not changed since. Look at the messages about these steps, lower"
                " optimizer.learning_rate, or set optimizer.skip_bad_steps.rewind_after to skip the data of such steps"
            )
        return None
