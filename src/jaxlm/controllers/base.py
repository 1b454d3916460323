"""The controller interface: decides between steps what happens next, from metrics of steps and evaluations.

    (step, metrics, state) -> (state, SetControls | Keep | Hold | Rewind | Next | None)

Hooks look, controllers decide, and only the engine acts: `engine/control.py` feeds controllers and keeps their state,
`engine/conductor.py` leads the run where they send it. A decision that continues the run as several (`Branch`) belongs here
too, once something can run the branches.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import draccus

Json = Any
"""None, a bool, number or string, or a list or dict of them. Exact for floats."""


class StopRunError(Exception):
    """A controller ends the run with an error. Its newest checkpoint stays."""


class Measured(Protocol):
    """What a controller may ask the objective of its phase."""

    @property
    def reports_teacher_loss(self) -> bool:
        """Whether the metrics of a step have the losses of both model and teacher."""
        ...


@dataclass(frozen=True)
class DoneStep:
    """The step that the metrics belong to.

    Attributes:
        number: steps done (`step-N` = N).
        is_last: whether it is the last step of the phase.
        is_skipped: whether its update was skipped. Not known of evaluations: False.
    """

    number: int
    is_last: bool
    is_skipped: bool


@dataclass(frozen=True)
class SetControls:
    """New values of controls. They hold until the next ones, or the end of the phase.

    Attributes:
        values: the controls that change, by name.
    """

    values: Mapping[str, float]


@dataclass(frozen=True)
class Keep:
    """The step is saved, and its checkpoint stays until the next one kept for this purpose, or the end of the phase. Only an
    evaluation can lead to this: later, the weights of the step are gone.

    If the checkpoint cannot be saved, the state of the controller is again that from before this decision.

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
        max_rewinds: how often a run goes back before it stops with an error.
        limit_key: the key that says so.
    """

    first: int
    last: int
    reason: str
    max_rewinds: int
    limit_key: str


@dataclass(frozen=True)
class Next:
    """Ends the phase, possibly before its last step. The run continues with the next phase, or ends.

    Attributes:
        reason: why, for messages.
        weights: the purpose of the kept checkpoint to continue from; None keeps the current weights.
    """

    reason: str
    weights: str | None = None


Decision = SetControls | Keep | Hold | Rewind | Next


class Controller(abc.ABC):
    """Decides what happens next in a phase. A frozen dataclass: what it remembers is its state, which is plain JSON.

    All processes ask it with the same metrics in the same order, so that they decide alike. It must depend on nothing else.
    """

    survives_rewind: ClassVar[bool] = False
    """Whether its state stays when the run goes back. Otherwise, it is again that of the checkpoint."""
    follows_schedule: ClassVar[bool] = False
    """Whether it goes on in a phase in which the learning-rate schedule goes on (`carry_optimizer`), instead of anew."""

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

    def check(self, objective: Measured, key: str, phase: str) -> None:
        """Raises `ConfigError` if the objective of its phase does not measure what it needs. Args: key, phase: where it is
        written and the name of the phase, for messages."""
        return

    @abc.abstractmethod
    def controls(self) -> Mapping[str, float]:
        """The controls that it sets (`core/controls.py`), and their values at the start of a phase."""

    @abc.abstractmethod
    def init(self) -> Json:
        """The state at the start of a phase."""

    @abc.abstractmethod
    def after(self, step: DoneStep, metrics: Mapping[str, float], state: Json) -> tuple[Json, Decision | None]:
        """The new state, and what to do.

        Called after each training step, and after each evaluation, that has any of its metrics.

        Args:
            metrics: those of its metrics that were measured.
            state: not to be changed in place.

        Raises:
            StopRunError: the run should not go on.
        """


@dataclass(frozen=True)
class ControllerConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.controllers"):
    """Decides between steps, from metrics, what happens next in the run."""

    @abc.abstractmethod
    def build(self, learning_rate: float) -> Controller:
        """The controller of a phase.

        Args:
            learning_rate: `optimizer.learning_rate` of the phase, the peak of its schedule.

        Raises:
            ConfigError: the keys do not fit together.
        """
