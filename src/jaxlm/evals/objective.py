"""Measures the training objective on the validation data."""

import math
from collections import defaultdict
from typing import ClassVar

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.sums import Largest
from jaxlm.evals.base import Eval, EvalConfig, EvalContext, EvalScope
from jaxlm.evals.batches import read_results
from jaxlm.models.base import LanguageModel
from jaxlm.reading.choices import choice

_OF_THE_LOSS_EVAL = "loss"


@choice(EvalConfig, "objective")
class ObjectiveEvalConfig(EvalConfig):
    """Measures what the objective does in training, over one pass of the validation data, without dropout. It logs the
    minimized loss as `objective`, and the objective's metrics under their own names, such as `rewards/accuracies` of `dpo`
    and `divergence` of `distill`; only its metric `loss` is left to the evaluation of that name.
    """

    scope: ClassVar[EvalScope] = EvalScope(validation=True, objective=True)

    def open(self, ctx: EvalContext) -> Eval:
        if ctx.measure is None:
            raise ConfigError("evals: type objective measures the objective of a run, so it works only in training")
        return ObjectiveEval(ctx)


class ObjectiveEval(Eval):
    """The metrics of `ObjectiveEvalConfig`, over all sources."""

    def __init__(self, ctx: EvalContext, first: int | None = None):
        """Args: first: measures only this many batches of each source; None measures all."""
        assert ctx.measure is not None
        self._ctx, self._measure, self._first = ctx, ctx.measure, first

    def run(self, model: LanguageModel) -> dict[str, float]:
        """The metrics; empty without validation data."""
        model = self._ctx.cast(model)
        totals: dict[tuple[int, str], float] = defaultdict(float)
        weights: dict[tuple[int, str], float] = defaultdict(float)
        for measured in read_results(self._measure(model, batch) for batch in self._ctx.batches(self._first)):
            for number, group in enumerate(measured):
                for name, part in group.items():
                    if isinstance(part, Largest):
                        totals[number, name] = max(totals.get((number, name), -math.inf), float(part.value))
                        weights[number, name] = 1.0
                    else:
                        totals[number, name] += float(part.total)
                        weights[number, name] += float(part.weight)
        means = {at: totals[at] / weights[at] for at in totals if weights[at]}
        metrics = {name: mean for (number, name), mean in means.items() if number and name != _OF_THE_LOSS_EVAL}
        minimized = [mean for (number, _), mean in means.items() if not number]
        return {"objective": sum(minimized), **metrics} if minimized else {}
