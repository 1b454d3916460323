"""How far each part of a model moves in a step, and for how long, where that is for the objective to say."""

import abc
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax


class Pace(eqx.Module):
    """Describes how the update of a step differs from what the optimizer computes.

    Attributes:
        factors: float32 {layers} by the path of the parameter: the factor of the update of each layer. Where it is 0, the
            parameter and its optimizer state stay as they are, to the bit. Other parameters have the factor 1.
        position: int32, number of updates since the optimizer and its schedule were last reset; 0 resets them. None never
            resets them.
    """

    factors: Mapping[str, jax.Array]
    position: jax.Array | None = None


class Pacing(abc.ABC):
    """Sets the pace of the layers within a phase, and ends the phase when nothing is left to train."""

    @property
    @abc.abstractmethod
    def finished_metric(self) -> str:
        """The metric of training steps that is 0 once there is nothing left to train, which ends the phase."""

    @property
    @abc.abstractmethod
    def restarts_optimizer(self) -> bool:
        """Tells whether the optimizer and its schedule start anew within the phase."""

    @abc.abstractmethod
    def scheduled_steps(self, num_steps: int, model: Any) -> int | None:
        """The number of steps that each learning-rate schedule spans; None for the whole phase.

        Args:
            num_steps: of the phase.
            model: the `ModelConfig` of the phase.

        Raises:
            ConfigError: the phase is too short.
        """

    @abc.abstractmethod
    def pace(self, slot: Any, trainable: Any) -> Pace:
        """The pace of a step. Traceable.

        Args:
            slot: the objective's state before the step.
            trainable: the trainable leaves, with None for frozen ones.
        """
