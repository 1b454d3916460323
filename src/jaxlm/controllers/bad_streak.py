"""Counts the updates that were skipped in a row. If there are too many, the run goes back or ends.

Source: the remedy for loss spikes in Chowdhery et al. 2022, PaLM (arXiv:2204.02311), section 5.1: continue from an earlier
checkpoint and skip the batches that were read since.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxlm.controllers.base import Controller, Decision, DoneStep, Hold, Rewind, StopRunError
from jaxlm.core.guards import SKIPPED, RewindRule


class SkippedStepsError(StopRunError):
    """Too many updates in a row were skipped, and the run does not go back."""


@dataclass(frozen=True)
class BadStreak(Controller):
    """Its state is the length of the current streak of skipped updates.

    Attributes:
        rule: None never goes back.
        limit: length of a streak that ends the run; None never ends it.
    """

    rule: RewindRule | None
    limit: int | None

    name: ClassVar[str] = "bad_streak"
    survives_rewind: ClassVar[bool] = True

    @property
    def metrics(self) -> Mapping[str, str]:
        return {"trainer.crash_after_skipped": SKIPPED}

    def controls(self) -> Mapping[str, float]:
        return {}

    def init(self) -> int:
        return 0

    def after(self, step: DoneStep, metrics: Mapping[str, float], state: int) -> tuple[int, Decision | None]:
        """Raises: SkippedStepsError: the streak is as long as the limit."""
        length = state + 1 if step.is_skipped else 0
        if self.rule is not None and length >= self.rule.after:
            first, last = step.number - length + 1, step.number
            reason = f"the updates of steps {first} to {last} were skipped"
            return 0, Rewind(first, last, reason, self.rule.max_rewinds, "optimizer.skip_bad_steps.max_rewinds")
        if self.limit is not None and length >= self.limit:
            raise SkippedStepsError(
                f"step {step.number}: the updates of {length} steps in a row were skipped (trainer.crash_after_skipped:"
                f" {self.limit}). The weights have not changed since. Look at the messages about these steps, lower"
                " optimizer.learning_rate, or set optimizer.skip_bad_steps.rewind_after to skip the data of such steps"
            )
        return length, Hold() if length else None
