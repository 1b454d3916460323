"""Guards inspect every step's loss and gradient norm, and may skip its update.

The update of a non-finite step is always skipped, regardless of the guards.
"""

import abc
from typing import Any, ClassVar, NamedTuple

import jax


class StepStats(NamedTuple):
    """Values of a step before its update is applied.

    Attributes:
        objective: float32, the minimized loss.
        norm: float32, the global gradient norm.
        finite: bool, whether both are finite.
    """

    objective: jax.Array
    norm: jax.Array
    finite: jax.Array


class Verdict(NamedTuple):
    """A guard's decision about a step.

    Attributes:
        applies: bool, whether the update may be applied.
        slot: the guard's new state, whether the update is applied or not.
        metrics: scalars to log, by name.
    """

    applies: jax.Array
    slot: Any
    metrics: dict[str, jax.Array]


class StepGuard(abc.ABC):
    """Decides whether to apply each step's update.

    Its state is part of `RunState`: it is checkpointed and equal on every process.
    """

    name: ClassVar[str]
    """Name of the guard's slot."""

    @abc.abstractmethod
    def init_slot(self) -> Any:
        """The state before the first step. Traceable."""

    @abc.abstractmethod
    def judge(self, slot: Any, stats: StepStats) -> Verdict:
        """Judges one step. Traceable."""
