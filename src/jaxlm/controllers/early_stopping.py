"""Ends a phase early: a metric is good enough or no longer improves, updates are skipped, or nothing is left to train.

If too many updates are skipped in a row, the run goes back, if it may, or ends.

Source: `EarlyStopping`: Prechelt 1998, Early Stopping - But When?, in Neural Networks: Tricks of the Trade (criterion UP,
with the best weights kept). `BadStreak`: the remedy for loss spikes in Chowdhery et al. 2022, PaLM (arXiv:2204.02311),
section 5.1: continue from an earlier checkpoint and skip the batches that were read since.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Literal

from jaxlm.controllers.base import (
    Controller,
    Decision,
    DoneStep,
    Hold,
    Json,
    Keep,
    Next,
    Persistence,
    Rewind,
    StopRunError,
    unchanged,
)
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeFloat, PositiveInt
from jaxlm.core.guards import EVAL_PREFIX, SKIPPED, RewindRule
from jaxlm.core.rules import Rules, only, some_of

BEST = "best"
"""The purpose for which the checkpoint of the best evaluation is kept."""


@dataclass(frozen=True)
class BestEval:
    """The best value that a phase's evaluations have measured of a metric.

    Attributes:
        value: the best value; infinite if no evaluation has measured a finite one.
        step: the step of that evaluation.
        reference: the last value that was better than the one before it by at least `min_delta`.
        stale: number of evaluations since then.
    """

    value: float
    step: int
    reference: float
    stale: int


@dataclass(frozen=True)
class UntilConfig:
    """Ends a phase early, depending on a metric of its evaluations (`trainer.steps_per_eval`). `num_train_steps` remains the
    longest the phase can be, and the learning-rate schedule still spans it.

    Attributes:
        metric: name of the metric as in `metrics.jsonl`, such as `eval/loss`, `eval/bpb` or `eval/ema/loss`.
        below: end the phase when the metric is below this value; null does not.
        above: end the phase when the metric is above this value; null does not. Requires `mode: max`.
        patience: end the phase after this many evaluations in a row without improvement; null does not. The run goes on, or
            ends, with the weights of the best evaluation, whose checkpoint is kept until then. This also holds if the phase
            reaches its last step.
        min_delta: an evaluation counts as improvement for `patience` if the metric is better by more than this.
        mode: `min` if lower values are better, `max` if higher values are.
    """

    metric: str
    below: float | None = None
    above: float | None = None
    patience: PositiveInt | None = None
    min_delta: NonNegativeFloat = 0.0
    mode: Literal["min", "max"] = "min"

    key_rules: ClassVar[Rules] = (
        some_of("below", "above", "patience"),
        only("below", when="mode", is_="min"),
        only("above", when="mode", is_="max"),
        only("min_delta", when="patience"),
    )

    def __post_init__(self):
        if not self.metric.startswith(EVAL_PREFIX):
            raise ConfigError(f"metric: '{self.metric}' given, a metric of an evaluation expected, such as eval/loss")

    def is_better(self, value: float, than: float) -> bool:
        """Tells whether a value of the metric is better than another; NaN never is."""
        return value < than if self.mode == "min" else value > than

    def reached(self, value: float) -> str | None:
        """Describes the bound that the value has passed; None if it has passed none."""
        if self.below is not None and value < self.below:
            return f"{self.metric} is {value:.4f}, below {self.below:g}"
        if self.above is not None and value > self.above:
            return f"{self.metric} is {value:.4f}, above {self.above:g}"
        return None

    def after(self, best: BestEval | None, value: float, step: int) -> BestEval:
        """The best evaluation including that of `step`. Args: best: before it; None if it is the phase's first."""
        if best is None:
            worst = math.inf if self.mode == "min" else -math.inf
            best = BestEval(worst, 0, worst, 0)
        if self.is_better(value, best.value):
            best = replace(best, value=value, step=step)
        margin = self.min_delta if self.mode == "min" else -self.min_delta
        if self.is_better(value + margin, best.reference):
            return replace(best, reference=value, stale=0)
        return replace(best, stale=best.stale + 1)


@dataclass(frozen=True)
class EarlyStopping(Controller):
    """Its state is the phase's best evaluation; None before the first, and without `patience`."""

    until: UntilConfig

    name: ClassVar[str] = "early_stopping"
    persistence: ClassVar[Persistence] = Persistence(rewound=unchanged)

    @property
    def metrics(self) -> Mapping[str, str]:
        return {"until.metric": self.until.metric}

    def controls(self) -> Mapping[str, float]:
        return {}

    def init(self) -> Json:
        return None

    def after(self, step: DoneStep, metrics: Mapping[str, float], state: Json) -> tuple[Json, Decision | None]:
        until, value = self.until, metrics[self.until.metric]
        if (reason := until.reached(value)) is not None:
            return state, Next(reason)
        if until.patience is None:
            return state, None
        best = until.after(None if state is None else BestEval(**state), value, step.number)
        is_best = best.step == step.number
        if best.stale >= until.patience and not (is_best and step.is_last):
            reason = f"{until.metric} has not improved in {best.stale} evaluations"
            return asdict(best), Next(reason, None if is_best else BEST)
        if is_best:
            return asdict(best), Keep(BEST)
        return asdict(best), Next("its last step is done", BEST) if step.is_last else None


class SkippedStepsError(StopRunError):
    """Too many updates in a row were skipped, and the run does not go back."""


@dataclass(frozen=True)
class BadStreak(Controller):
    """Its state is the length of the current streak of skipped updates.

    Attributes:
        rule: None never goes back.
        limit: length of a streak that ends the run; None never ends it.
    """

    rule: RewindRule | None
    limit: int | None

    name: ClassVar[str] = "bad_streak"
    persistence: ClassVar[Persistence] = Persistence(rewound=unchanged)

    @property
    def metrics(self) -> Mapping[str, str]:
        return {"trainer.crash_after_skipped": SKIPPED}

    def controls(self) -> Mapping[str, float]:
        return {}

    def init(self) -> int:
        return 0

    def after(self, step: DoneStep, metrics: Mapping[str, float], state: int) -> tuple[int, Decision | None]:
        """Raises: SkippedStepsError: the streak is as long as the limit."""
        length = state + 1 if step.is_skipped else 0
        if self.rule is not None and length >= self.rule.after:
            first, last = step.number - length + 1, step.number
            reason = f"the updates of steps {first} to {last} were skipped"
            return 0, Rewind(first, last, reason, self.rule.max_rewinds, "optimizer.skip_bad_steps.max_rewinds")
        if self.limit is not None and length >= self.limit:
            raise SkippedStepsError(
                f"step {step.number}: the updates of {length} steps in a row were skipped (trainer.crash_after_skipped:"
                f" {self.limit}). The weights have not changed since. Look at the messages about these steps, lower"
                " optimizer.learning_rate, or set optimizer.skip_bad_steps.rewind_after to skip the data of such steps"
            )
        return length, Hold() if length else None


@dataclass(frozen=True)
class Finished(Controller):
    """It has no state.

    Attributes:
        metric: of training steps; 0 once nothing is left.
    """

    metric: str

    name: ClassVar[str] = "finished"

    @property
    def metrics(self) -> Mapping[str, str]:
        return {"objective": self.metric}

    def controls(self) -> Mapping[str, float]:
        return {}

    def init(self) -> Json:
        return None

    def after(self, step: DoneStep, metrics: Mapping[str, float], state: Json) -> tuple[Json, Decision | None]:
        return state, Next(f"{self.metric} is 0") if metrics[self.metric] == 0 else None
