"""What the compiled step asks about its update: guards that may skip it, and controls.

Guards inspect every step's loss and gradient norm, and may skip its update. That of a non-finite step is always skipped,
whatever the guards say.

Controls are numbers that the step reads from the state, so that they change between steps without compiling again. A
`Controller` (`controllers/`) declares and sets them; the engine keeps them in `state.slots["controls"]` as float32 scalars.
"""

import abc
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:  # the report reads the names below, without jax
    import jax

OBJECTIVE, GRADIENT_NORM, UPDATE_NORM = "train/objective", "grad/norm/total", "updates/norm/total"
SKIPPED = "train/skipped_steps"
"""Names of the metrics that every step has."""
EVAL_PREFIX = "eval/"
"""Names of the metrics of evaluations begin with it."""


class StepStats(NamedTuple):
    """Values of a step before its update is applied. What no guard reads is not computed.

    Attributes:
        objective: float32, the minimized loss.
        norm: float32, the global gradient norm.
        finite: bool, whether both, and the norm of the optimizer's update, are finite.
        update_norm: float32, the global norm of the update.
        gradient: of what the optimizer updates, before it changes them; None for other leaves.
        parameters: the same parameters before the update; None for other leaves.
    """

    objective: "jax.Array"
    norm: "jax.Array"
    finite: "jax.Array"
    update_norm: "jax.Array"
    gradient: Any
    parameters: Any


class Verdict(NamedTuple):
    """A guard's decision about a step.

    Attributes:
        applies: bool, whether the update may be applied.
        slot: the guard's new state, whether the update is applied or not.
        metrics: scalars to log, by name.
    """

    applies: "jax.Array"
    slot: Any
    metrics: "dict[str, jax.Array]"


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

    @abc.abstractmethod
    def reason(self, metrics: Mapping[str, float]) -> str | None:
        """Says why this guard rejected a step whose update was skipped, from the step's metrics; None if it did not.

        It runs on the host. A reason that left the program would change how the program is compiled.
        """


class RewindRule(NamedTuple):
    """Says when a run goes back because updates were skipped.

    Attributes:
        after: number of updates skipped in a row.
        max_rewinds: how often the run goes back before it stops instead.
    """

    after: int
    max_rewinds: int


def skip_reason(guards: Iterable[StepGuard], metrics: Mapping[str, float]) -> str:
    """Says why an update was skipped: the guards that judged the step, and its metrics."""
    names = (("loss", OBJECTIVE), ("gradient", GRADIENT_NORM), ("update", UPDATE_NORM))
    infinite = [text for text, name in names if not math.isfinite(metrics[name])]
    texts = [f"{' and '.join(infinite)} {'is' if len(infinite) == 1 else 'are'} not finite"] if infinite else []
    return "; ".join([*texts, *filter(None, (guard.reason(metrics) for guard in guards))])


def is_finite(metrics: Mapping[str, float]) -> bool:
    """Tells whether a step's objective, gradient norm and update norm are finite."""
    return all(math.isfinite(metrics[name]) for name in (OBJECTIVE, GRADIENT_NORM, UPDATE_NORM))


SLOT = "controls"

LR_SCALE = "lr_scale"
"""Multiplies the learning rate of all updates, and so the decoupled weight decay."""

STRATEGY = "strategy"
"""The row of the table of a portfolio of optimizers that makes the updates (`systems/orchestrate/superset.py`)."""
NOWCAST = "nowcast"
"""How many steps ahead the weights are extrapolated, once (`systems/orchestrate/portfolio.py`); 0 does not."""

KNOWN = (LR_SCALE, STRATEGY, NOWCAST)
"""The controls that a step reads."""


def scaled(learning_rate: Any, controls: Mapping[str, Any]) -> Any:
    """The learning rate that applies, given the scheduled one. Traceable."""
    return learning_rate * controls[LR_SCALE] if LR_SCALE in controls else learning_rate


@dataclass(frozen=True)
class OptimizerFacts:
    """Holds what the rest of a run, such as a controller, may know of the optimizer of a phase.

    Attributes:
        learning_rate: the peak of its schedule.
        strategies: name -> the controls that select the strategy. The first is the one that it begins with. Empty if it has
            only one way to update.
        telemetry_window: number of recent steps of which it measures the metrics of `core/values/logged.py`; None if it
            does not.
        nowcast_window: updates over which it measures where the weights are going; None if it does not.
        rewind_rule: the rule by which the run goes back because updates were skipped; None if it never does.
        second_derivatives: whether it asks for second derivatives of the loss (`optim/curvature.py`).
    """

    learning_rate: float
    strategies: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    telemetry_window: int | None = None
    nowcast_window: int | None = None
    rewind_rule: RewindRule | None = None
    second_derivatives: bool = False
