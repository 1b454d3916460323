"""Lowers the learning rate when a metric has stopped improving.

Source: `torch.optim.lr_scheduler.ReduceLROnPlateau`, whose names and rules these are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from jaxlm.controllers.base import (
    Controller,
    ControllerConfig,
    Decision,
    DoneStep,
    Persistence,
    PhaseFacts,
    SetControls,
)
from jaxlm.core.field_types import STEPS_OF_PHASE, BelowOne, LearningRate, NonNegativeFloat, NonNegativeInt
from jaxlm.core.guards import LR_SCALE
from jaxlm.reading.choices import choice


@choice(ControllerConfig, "reduce_on_plateau")
class ReduceOnPlateauConfig(ControllerConfig):
    """Multiplies the scheduled learning rate by a factor, which falls when a metric has stopped improving.

    With `lr_schedule: constant`, the learning rates are those of torch's `ReduceLROnPlateau`.

    Attributes:
        metric: name of the metric as in `metrics.jsonl`. One of an evaluation, such as `eval/loss`, is looked at after each
            evaluation that measures it; one of training, such as `train/loss`, after each step.
        mode: `min` if lower values are better, `max` if higher values are.
        factor: what the learning rate is multiplied by at each reduction.
        patience: number of values in a row without improvement that are accepted. The next one reduces the learning rate.
        threshold: a value counts as improvement if it is better than the best so far by more than this.
        threshold_mode: `rel` if the threshold is a fraction of the best value, `abs` if it is a difference.
        cooldown: number of values after a reduction that do not count as without improvement.
        min_lr: lower bound of what the reductions make of `optimizer.learning_rate`. The schedule, and other learning rates
            such as those of `optimizer.groups`, are multiplied by the same factor.
        eps: a reduction that would change `optimizer.learning_rate` by no more than this is left out.
    """

    metric: str = "eval/loss"
    mode: Literal["min", "max"] = "min"
    factor: BelowOne = 0.1
    patience: Annotated[NonNegativeInt, STEPS_OF_PHASE] = 10
    threshold: NonNegativeFloat = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: NonNegativeInt = 0
    min_lr: LearningRate = 0.0
    eps: NonNegativeFloat = 1e-8

    def build(self, phase: PhaseFacts) -> "ReduceOnPlateau":
        return ReduceOnPlateau(self, phase.learning_rate)

    def is_better(self, value: float, best: float) -> bool:
        """Tells whether a value is an improvement; NaN never is."""
        sign = 1 if self.mode == "max" else -1
        bound = best * (1 + sign * self.threshold) if self.threshold_mode == "rel" else best + sign * self.threshold
        return value > bound if self.mode == "max" else value < bound


@dataclass(frozen=True)
class ReduceOnPlateau(Controller):
    """Its state: the `best` value, the number of `bad` values since, how many values of the `cooldown` are left, and the
    `scale` of the learning rate.
    """

    name: ClassVar[str] = "reduce_on_plateau"
    persistence: ClassVar[Persistence] = Persistence(follows_schedule=True)

    config: ReduceOnPlateauConfig
    learning_rate: float

    @property
    def metrics(self) -> Mapping[str, str]:
        return {"reduce_on_plateau.metric": self.config.metric}

    def controls(self) -> Mapping[str, float]:
        return {LR_SCALE: 1.0}

    def init(self) -> dict[str, Any]:
        return {"best": math.inf if self.config.mode == "min" else -math.inf, "bad": 0, "cooldown": 0, "scale": 1.0}

    def after(
        self, step: DoneStep, metrics: Mapping[str, float], state: dict[str, Any]
    ) -> tuple[dict[str, Any], Decision | None]:
        config, value = self.config, metrics[self.config.metric]
        best, bad, cooldown, scale = (state[key] for key in ("best", "bad", "cooldown", "scale"))
        best, bad = (value, 0) if config.is_better(value, best) else (best, bad + 1)
        if cooldown > 0:
            cooldown, bad = cooldown - 1, 0
        decision = None
        if bad > config.patience:
            bad, cooldown = 0, config.cooldown
            before = self.learning_rate * scale
            reduced = max(before * config.factor, config.min_lr)
            if before - reduced > config.eps:
                scale = reduced / self.learning_rate
                decision = SetControls({LR_SCALE: scale})
        return {"best": best, "bad": bad, "cooldown": cooldown, "scale": scale}, decision
