"""The controller interface: decides between steps what happens next, from metrics of steps and evaluations.

    (step, metrics, state) -> (state, SetControls | Keep | Hold | Rewind | Next | Branch | None)

Hooks look, controllers decide, and only the engine acts: `engine/control.py` feeds controllers and keeps their state,
`engine/branch.py` runs branches, and `engine/phase_runner.py` leads the run where they send it.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import draccus

from jaxlm.core.guards import OptimizerFacts
from jaxlm.reading.choices import Registry
from jaxlm.reading.effects import Effect, follows

Json = Any
"""None, a bool, number or string, or a list or dict of them. Exact for floats."""


class StopRunError(Exception):
    """A controller ends the run with an error. Its newest checkpoint stays."""


@dataclass(frozen=True)
class PhaseFacts(OptimizerFacts):
    """Holds what a controller may know of its phase, in addition to the optimizer.

    Attributes:
        has_validation: whether there is validation data, which a `Branch` needs.
        is_annotated: whether the objective reads what is stored about the training data as it comes to it. Then no batch can
            be read again, as a `Branch` does.
        reports_teacher_loss: whether the metrics of a step have the losses of both model and teacher.
    """

    has_validation: bool = False
    is_annotated: bool = False
    reports_teacher_loss: bool = False


@dataclass(frozen=True)
class DoneStep:
    """The step that the metrics belong to.

    Attributes:
        number: steps done (`step-N` = N).
        is_last: whether it is the last step of the phase.
        is_skipped: whether its update was skipped. Not known of evaluations: False.
        progress: the fraction of the phase that is done.
        effective: the first step that what follows from it can change. `Rewind` takes effect at once.
        branched: what came of the branch of this controller that ended with it; None for what is measured of the step.
    """

    number: int
    is_last: bool
    is_skipped: bool
    progress: float
    effective: int
    branched: "Branched | None" = None


@dataclass(frozen=True)
class SetControls:
    """New values of controls. They hold until the next ones, or the end of the phase.

    Attributes:
        values: the controls that change, by name.
    """

    values: Mapping[str, float]


@dataclass(frozen=True)
class Keep:
    """A step is saved, and its checkpoint stays until the next one kept for this purpose, or the end of the phase.

    After an evaluation, that is its step; if it cannot be saved, the state of the controller is again that from before this
    decision. After a training step, whose weights are gone when it is measured, it is the step in which other decisions
    would take effect; the controller does not learn whether it was saved.

    Attributes:
        purpose: the name of the pin in the run's history.
    """

    purpose: str


@dataclass(frozen=True)
class Hold:
    """The run may go back: the newest checkpoint from before this step stays until a step without this decision."""


@dataclass(frozen=True)
class Rewind:
    """The run goes back to its newest checkpoint from before some steps, and on with the data after them.

    Attributes:
        first, last: the first and the last of these steps (`step-N` = N).
        reason: why, for messages.
        max_rewinds: how often a run goes back for this reason before it stops with an error; None for any number.
        limit_key: the key that says so, or that makes the run go back.
        purposes: of the kept checkpoints that it may go back to; empty for any checkpoint.
        controls: the controls of this controller that change, by name.
    """

    first: int
    last: int
    reason: str
    max_rewinds: int | None
    limit_key: str
    purposes: Sequence[str] = ()
    controls: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Next:
    """Ends the phase, possibly before its last step. The run continues with the next phase, or ends.

    Attributes:
        reason: why, for messages.
        weights: the purpose of the kept checkpoint to continue from; None keeps the current weights.
    """

    reason: str
    weights: str | None = None


@dataclass(frozen=True)
class Branch:
    """The run tries several values of its controls: from one state, over the same batches. It goes on from the state of the
    one with the lowest loss on held-out batches; of several, from the first.

    Attributes:
        purpose: what the controller calls it (`Branched.purpose`).
        candidates: name -> the controls that change. The first is what would happen without the branch.
        num_steps: the most steps that a candidate trains. An evaluation, an export or a permanent checkpoint ends it earlier.
        probe_batches: number of held-out batches on which candidates are measured.
        ending: the controls that change when the branch ends, whichever candidate is the best.
    """

    purpose: str
    candidates: Mapping[str, Mapping[str, float]]
    num_steps: int
    probe_batches: int
    ending: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Branched:
    """Describes what came of a branch.

    Attributes:
        before: loss on the held-out batches before the first step of the branch.
        losses: candidate -> loss on these batches after its last step.
        winner: the candidate from whose state the run goes on.
        num_steps: steps that each candidate trained.
    """

    purpose: str
    before: float
    losses: Mapping[str, float]
    winner: str
    num_steps: int


Decision = SetControls | Keep | Hold | Rewind | Next | Branch


@dataclass(frozen=True)
class Noted:
    """A decision, or none, with what the run's records say about it.

    Attributes:
        notes: one line of `decisions.jsonl` each: at least `event`, and what else is plain JSON.
    """

    decision: Decision | None
    notes: Sequence[Mapping[str, Json]]


Answer = Decision | Noted | None


@dataclass(frozen=True)
class Persistence:
    """What becomes of what a controller remembers where the run does not simply go on.

    Attributes:
        rewound: returns its state after the run has gone back to a step, because of this controller or of another one. Its
            decisions that were not in effect yet are dropped. None: all is again as in the checkpoint.
        resumed: returns its state and the controls in effect when a run resumes with other keys. Decisions not in effect yet
            are dropped. None if nothing changes. Raises `ConfigError` if it cannot resume with these keys.
        follows_schedule: whether it goes on in a phase in which the learning-rate schedule goes on (`carry_optimizer`),
            instead of anew.
    """

    rewound: Callable[[Json, int], Json] | None = None
    resumed: Callable[[Json], tuple[Json, Mapping[str, float]] | None] = lambda state: None
    follows_schedule: bool = False


def unchanged(state: Json, step: int) -> Json:
    """The state of a controller that going back to a step does not change (`Persistence.rewound`)."""
    return state


class Controller(abc.ABC):
    """Decides what happens next in a phase. A frozen dataclass: what it remembers is its state, which is plain JSON.

    All processes ask it with the same metrics in the same order, so that they decide alike. It must depend on nothing else.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of its state in checkpoints. No other controller of the phase has it."""

    @property
    @abc.abstractmethod
    def metrics(self) -> Mapping[str, str]:
        """The metrics that it needs, as in `metrics.jsonl`, by the configuration key that names them.

        Metrics of a training step must be computed on the devices: what a process measures by its own clock differs.
        """

    @abc.abstractmethod
    def controls(self) -> Mapping[str, float]:
        """The controls that it sets (`core/guards.py`), and their values at the start of a phase."""

    @abc.abstractmethod
    def init(self) -> Json:
        """The state at the start of a phase."""

    @abc.abstractmethod
    def after(self, step: DoneStep, metrics: Mapping[str, float], state: Json) -> tuple[Json, Answer]:
        """The new state, and what to do.

        Called after each training step, and after each evaluation, that has any of its metrics; and after a branch of its
        own (`step.branched`), whose winner has set the controls already. Its cost is spent, so this comes before the metrics
        of the winner's steps, from which the run may go back.

        Args:
            metrics: those of its metrics that were measured; none after a branch.
            state: not to be changed in place.

        Raises:
            StopRunError: the run should not go on.
        """

    @property
    def persistence(self) -> Persistence:
        """What becomes of its state where the run does not simply go on."""
        return Persistence()


@dataclass(frozen=True)
class ControllerConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """Decides between steps, from metrics, what happens next in the run."""

    keys_effect: ClassVar[Effect] = follows("the controller decides by the new value from here")

    @abc.abstractmethod
    def build(self, phase: PhaseFacts) -> Controller:
        """The controller of a phase. Raises `ConfigError` if the keys do not fit together, or not the phase."""

    def without_effect(self, spans: Sequence[range]) -> Sequence[str]:
        """The keys, with their values, that have no effect in phases of these steps. A run that is shortened for a try has
        such keys, so they are noted and not refused.

        Args:
            spans: the steps of each phase that has the controller.
        """
        return ()
