"""What looks at every step's loss and gradient, and may have its update left out.

The update of a step that is not finite is left out whatever the judges say.
"""

import abc
from typing import Any, ClassVar, NamedTuple

import jax


class StepStats(NamedTuple):
    """What a step shows before its update is applied.

    Attributes:
        objective: float32, what was minimised.
        norm: float32, of the gradient.
        finite: bool, whether both are.
    """

    objective: jax.Array
    norm: jax.Array
    finite: jax.Array


class Verdict(NamedTuple):
    """What a judge makes of a step.

    Attributes:
        applies: bool, whether the update may be applied.
        slot: the judge's memory after the step, applied or not.
        metrics: scalars to log, by name.
    """

    applies: jax.Array
    slot: Any
    metrics: dict[str, jax.Array]


class StepGuard(abc.ABC):
    """A judge of steps with a memory, which is part of the state: checkpointed, and the same on every process."""

    name: ClassVar[str]
    """Owner of the slot."""

    @abc.abstractmethod
    def init_slot(self) -> Any:
        """The memory before the first step. Traceable."""

    @abc.abstractmethod
    def judge(self, slot: Any, stats: StepStats) -> Verdict:
        """Judges one step. Traceable."""
