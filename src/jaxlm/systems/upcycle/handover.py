"""Ends a run whose phase begins with a model that is much worse than its teacher: something was lost on the way.

Source: caramba's check before its global phase, which stops if the student's loss is more than `max_loss_increase` times the
teacher's. A difference in nats is another measure: 1.5 times a loss of 2 is a perplexity 2.7 times as large, 1.5 times a loss
of 4 one 7.4 times as large.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxlm.controllers.base import Controller, ControllerConfig, Decision, DoneStep, Json, PhaseFacts, StopRunError
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import AboveOne, NonNegativeFloat
from jaxlm.reading.choices import choice

_LOSS, _TEACHER_LOSS = "train/loss", "train/teacher_loss"


class HandoverError(StopRunError):
    """The model that a phase begins with is much worse than its teacher."""


@choice(ControllerConfig, "handover")
class HandoverConfig(ControllerConfig):
    """At the first step of the phase, compares the next-token loss of the model, before its update, with that of the teacher
    on the same batch. A model that is much worse ends the run. The objective must measure both: `{type: distill,
    teacher_loss: true}`.

    Attributes:
        max_loss_increase: largest loss of the model, as a multiple of the teacher's; null allows any.
        max_loss_delta: largest difference of the two in nats; null allows any.
    """

    max_loss_increase: AboveOne | None = 1.5
    max_loss_delta: NonNegativeFloat | None = None

    def build(self, phase: PhaseFacts) -> "Handover":
        if not phase.reports_teacher_loss:
            raise ConfigError(
                "handover compares the losses of model and teacher, but the objective of the phase does not measure the"
                " teacher's. Set objective: {type: distill, teacher_loss: true}, or give the phase other controllers"
            )
        if self.max_loss_increase is None and self.max_loss_delta is None:
            raise ConfigError(
                "type handover: max_loss_increase and max_loss_delta are both null, so it would allow anything."
                " Set one of them, or remove it"
            )
        return Handover(self)


@dataclass(frozen=True)
class Handover(Controller):
    """Its state is whether the first step has been looked at."""

    config: HandoverConfig

    name: ClassVar[str] = "handover"

    @property
    def metrics(self) -> Mapping[str, str]:
        return {"handover.loss": _LOSS, "handover.teacher_loss": _TEACHER_LOSS}

    def controls(self) -> Mapping[str, float]:
        return {}

    def init(self) -> bool:
        return False

    def after(self, step: DoneStep, metrics: Mapping[str, float], state: Json) -> tuple[Json, Decision | None]:
        """Raises: HandoverError: the model is much worse than the teacher."""
        if state or _LOSS not in metrics or _TEACHER_LOSS not in metrics:
            return state, None
        own, theirs = metrics[_LOSS], metrics[_TEACHER_LOSS]
        limits = []
        if (factor := self.config.max_loss_increase) is not None:
            limits.append((factor * theirs, f"max_loss_increase: {factor:g}"))
        if (delta := self.config.max_loss_delta) is not None:
            limits.append((theirs + delta, f"max_loss_delta: {delta:g}"))
        broken = [f"at most {limit:.4f} is allowed (handover.{key})" for limit, key in limits if not own <= limit]
        if broken:
            raise HandoverError(
                f"step {step.number}: the model begins the phase with a loss of {own:.4f} on a batch on which the teacher's"
                f" is {theirs:.4f}; {' and '.join(broken)}. Too little of the teacher is left: look at the surgery, at how"
                " the phase before ended, and at initialize_from_hf, or raise the limit"
            )
        return True, None
