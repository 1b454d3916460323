"""The schedule of a momentum's decay rate."""

from dataclasses import dataclass

from jaxlm.core.field_types import BelowOne, ScheduleLength


@dataclass(frozen=True)
class MomentumSchedule:
    """Rises along a line to the optimizer's `momentum`, and falls along another while the learning rate decays.

    Attributes:
        initial: decay rate of the momentum in the first update.
        warmup: number of updates until it is `momentum`. Up to 1: fraction of the phase; above 1: steps. A phase that ends
            before does not shorten it.
        final: decay rate at the end of the phase, which it falls to over the last decay of the learning rate. Null keeps
            `momentum`.
    """

    initial: BelowOne = 0.85
    warmup: ScheduleLength = 300
    final: BelowOne | None = None
