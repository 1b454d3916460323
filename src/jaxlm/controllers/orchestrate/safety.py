"""When a run has gone wrong, and to which of its kept checkpoints it goes back.

Source: Chowdhery et al. 2022, PaLM (arXiv:2204.02311), section 5.1: continue from an earlier checkpoint, and skip the batches
since.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from jaxlm.core.field_types import AboveOne, NonNegativeFloat, NonNegativeInt, PositiveInt
from jaxlm.core.values import logged

PURPOSES = ("orchestrator_0", "orchestrator_1")
"""Of the two checkpoints that are kept: while the newer one is in quarantine, the older one is there."""


@dataclass(frozen=True)
class Safety:
    """Goes back to a checkpoint when the loss or the gradient norm is far above what it was, and past the data since.

    Attributes:
        strategy: the strategy with which the run goes on after it has gone back, or to which it switches if it cannot.
        max_loss_increase: the run has gone wrong if the running mean of the loss is more than this multiple of a slower one.
            Null allows any.
        max_loss_delta: the same for their difference, in nats.
        max_grad_increase: the run has gone wrong if a gradient norm is more than this multiple of the recent median. Null
            allows any. A norm that is not finite does not count: its update is skipped.
        max_skipped: the run has gone wrong if this many updates in a row were skipped. Null allows any number. A dynamic loss
            scale skips up to 15 at the start.
        snapshot_interval: number of steps between the checkpoints that the run may go back to. Two are kept.
        quarantine: a checkpoint is trusted after this many steps without a trip.
        max_rollbacks_in_a_row: how often the run goes back without `snapshot_interval` good steps in between. The next time,
            it stops with an error.
    """

    strategy: str = "spike_resistant"
    max_loss_increase: AboveOne | None = 1.5
    max_loss_delta: NonNegativeFloat | None = None
    max_grad_increase: AboveOne | None = 100.0
    max_skipped: PositiveInt | None = 16
    snapshot_interval: PositiveInt = 200
    quarantine: NonNegativeInt = 20
    max_rollbacks_in_a_row: Annotated[int, Interval(ge=0, le=100)] = 3

    @property
    def never_trips(self) -> bool:
        """Whether all limits are null."""
        limits = (self.max_loss_increase, self.max_loss_delta, self.max_grad_increase, self.max_skipped)
        return all(limit is None for limit in limits)

    def trip(self, metrics: Mapping[str, float], skipped: int) -> str | None:
        """Why the run has gone wrong, in words; None if it has not. Args: skipped: updates skipped in a row."""
        loss, reference = metrics[logged.LOSS], metrics[logged.LOSS_REFERENCE]
        ratio = metrics[logged.GRAD_NORM_RATIO]
        if self.max_skipped is not None and skipped >= self.max_skipped:
            return f"the updates of {skipped} steps in a row were skipped (max_skipped: {self.max_skipped})"
        if self.max_grad_increase is not None and self.max_grad_increase < ratio < math.inf:
            return f"the gradient norm is {ratio:,.0f} times its median (max_grad_increase: {self.max_grad_increase:g})"
        if self.max_loss_increase is not None and loss > self.max_loss_increase * reference > 0:
            return f"the mean loss is {loss:.4f} after {reference:.4f} (max_loss_increase: {self.max_loss_increase:g})"
        if self.max_loss_delta is not None and loss > reference + self.max_loss_delta:
            return f"the mean loss is {loss:.4f} after {reference:.4f} (max_loss_delta: {self.max_loss_delta:g})"
        return None

    def target(self, snapshots: Mapping[str, int], trusted: int, step: int) -> str | None:
        """The purpose of the checkpoint to go back to; None if there is none.

        Args:
            snapshots: purpose -> step of a checkpoint that was asked for.
            trusted: step of the one to which the run last went back; -1 if it never did.
            step: after which the run has gone wrong.
        """
        good = [(at, purpose) for purpose, at in snapshots.items() if at <= step - self.quarantine or at == trusted]
        return max(good)[1] if good else None
