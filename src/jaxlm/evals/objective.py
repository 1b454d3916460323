"""Measures the training objective on the validation data."""

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.types import Largest, Sum
from jaxlm.evals.base import Eval, EvalConfig, EvalContext
from jaxlm.models.base import LanguageModel
from jaxlm.reading.choices import choice

_MAX_IN_FLIGHT = 4
_OF_THE_LOSS_EVAL = "loss"


@choice(EvalConfig, "objective")
class ObjectiveEvalConfig(EvalConfig):
    """What the objective measures in training, over one pass of the validation data, without dropout. It logs the minimized
    loss as `objective`, and the objective's metrics under their own names, such as `rewards/accuracies` of `dpo` and
    `divergence` of `distill`; only its metric `loss` is left to the evaluation of that name.
    """

    reads_validation: ClassVar[bool] = True
    reads_objective: ClassVar[bool] = True

    def open(self, ctx: EvalContext) -> Eval:
        if ctx.measure is None:
            raise ConfigError("evals: type objective measures the objective of a run, so it works only in training")
        return ObjectiveEval(ctx)


class ObjectiveEval(Eval):
    """The metrics of `ObjectiveEvalConfig`, over all sources."""

    def __init__(self, ctx: EvalContext):
        assert ctx.measure is not None
        self._measure = ctx.measure
        self._validation = ctx.validation
        self._cast = jax.jit(ctx.precision.cast_to_compute)

    def run(self, model: LanguageModel) -> dict[str, float]:
        """The metrics; empty without validation data."""
        model, pending = self._cast(model), deque()
        totals: dict[tuple[int, str], float] = defaultdict(float)
        weights: dict[tuple[int, str], float] = defaultdict(float)

        def add(measured: tuple[Mapping[str, Sum], Mapping[str, Sum | Largest]]) -> None:
            for number, group in enumerate(jax.device_get(measured)):
                for name, part in group.items():
                    if isinstance(part, Largest):
                        totals[number, name] = max(totals.get((number, name), -math.inf), float(part.value))
                        weights[number, name] = 1.0
                    else:
                        totals[number, name] += float(part.total)
                        weights[number, name] += float(part.weight)

        for batch in self._batches():
            pending.append(self._measure(model, batch))
            if len(pending) >= _MAX_IN_FLIGHT:
                add(pending.popleft())
        for measured in pending:
            add(measured)
        means = {at: totals[at] / weights[at] for at in totals if weights[at]}
        metrics = {name: mean for (number, name), mean in means.items() if number and name != _OF_THE_LOSS_EVAL}
        minimized = [mean for (number, _), mean in means.items() if not number]
        return {"objective": sum(minimized), **metrics} if minimized else {}

    def _batches(self) -> Any:
        return (batch for source in self._validation for batch in source.batches())
