"""Guards inspect every step's loss and gradient norm, and may skip its update.

The update of a non-finite step is always skipped, regardless of the guards.
"""

import abc
import math
from collections.abc import Iterable, Mapping
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
        reason: int32, 0 if the update may be applied; otherwise the number of one of the guard's `reasons`, from 1.
        slot: the guard's new state, whether the update is applied or not.
        metrics: scalars to log, by name.
    """

    reason: jax.Array
    slot: Any
    metrics: dict[str, jax.Array]

    @property
    def applies(self) -> jax.Array:
        """bool, whether the update may be applied."""
        return self.reason == 0


class StepGuard(abc.ABC):
    """Decides whether to apply each step's update.

    Its state is part of `RunState`: it is checkpointed and equal on every process.
    """

    name: ClassVar[str]
    """Name of the guard's slot."""
    reasons: ClassVar[tuple[str, ...]]
    """Why the guard skips updates: templates over the step's metrics, such as `loss {train/objective:.4g} is too large`."""

    @abc.abstractmethod
    def init_slot(self) -> Any:
        """The state before the first step. Traceable."""

    @abc.abstractmethod
    def judge(self, slot: Any, stats: StepStats) -> Verdict:
        """Judges one step. Traceable."""


class RewindRule(NamedTuple):
    """When a run goes back because updates were skipped.

    Attributes:
        after: number of updates skipped in a row.
        max_rewinds: how often the run goes back before it stops instead.
    """

    after: int
    max_rewinds: int


def skip_reason(guards: Iterable[StepGuard], reasons: Mapping[str, int], metrics: Mapping[str, float]) -> str:
    """Says why an update was skipped.

    Args:
        guards: the guards that judged the step.
        reasons: guard's name -> its `Verdict.reason`.
        metrics: the step's metrics.
    """
    finite = all(math.isfinite(metrics[name]) for name in ("train/objective", "grad/norm/total"))
    texts = [] if finite else ["loss or gradient is not finite"]
    for guard in guards:
        if reason := reasons.get(guard.name, 0):
            texts.append(guard.reasons[reason - 1].format_map(metrics))
    return "; ".join(texts)
