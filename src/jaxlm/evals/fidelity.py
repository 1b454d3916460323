"""Compares how well a model and a reference predict the same text."""

import math
from collections.abc import Mapping

import jax

from jaxlm.core.field_types import AboveOne, NonNegativeFloat
from jaxlm.evals.base import Eval, EvalConfig, EvalContext, read_sums
from jaxlm.evals.gate import PairGateConfig, at_most
from jaxlm.evals.limits import Limit
from jaxlm.evals.loss import perplexity
from jaxlm.models.base import LanguageModel
from jaxlm.reading.choices import choice


@choice(EvalConfig, "fidelity")
class FidelityEvalConfig(PairGateConfig):
    """Mean loss of the model and of a reference on the same tokens in nats, `nll` and `reference_nll`; their difference
    `delta_nll`, which is positive if the model is worse; and `ppl_ratio`, the exponential of that.

    Attributes:
        max_delta_nll: largest `delta_nll`; null allows any.
        max_ppl_ratio: largest `ppl_ratio`; null allows any.
    """

    max_delta_nll: NonNegativeFloat | None = 0.05
    max_ppl_ratio: AboveOne | None = 1.05

    @property
    def own_metrics(self) -> tuple[str, ...]:
        return ("nll", "reference_nll", "delta_nll", "ppl_ratio")

    @property
    def own_limits(self) -> Mapping[str, Limit | None]:
        return {
            "delta_nll": at_most(self.max_delta_nll, "max_delta_nll"),
            "ppl_ratio": at_most(self.max_ppl_ratio, "max_ppl_ratio"),
        }

    def open(self, ctx: EvalContext) -> Eval:
        return FidelityEval(self, ctx)


class FidelityEval(Eval):
    """The metrics of `FidelityEvalConfig`."""

    def __init__(self, config: FidelityEvalConfig, ctx: EvalContext):
        self._config, self._ctx = config, ctx
        self._cast = jax.jit(ctx.precision.cast_to_compute)
        self._sums = jax.jit(lambda model, batch: ctx.score(model, batch).sums(), out_shardings=ctx.layout.replicated())

    def run(self, model: LanguageModel) -> dict[str, float]:
        """The metrics; empty without validation data."""
        own = self._mean_loss(self._cast(model))
        if math.isnan(own[1]):
            return {}
        theirs = self._mean_loss(self._ctx.reference(self._config.reference))
        delta = own[0] - theirs[0]
        metrics = {"nll": own[0], "reference_nll": theirs[0], "delta_nll": delta, "ppl_ratio": perplexity(delta)}
        return {f"{self._config.title}/{name}": value for name, value in metrics.items()}

    def _mean_loss(self, model: LanguageModel) -> tuple[float, float]:
        """The mean loss, and the number of targets; NaN without targets."""
        sums = read_sums((self._sums(model, batch) for batch in self._config.first_batches(self._ctx)), 2)
        return (float(sums[0] / sums[1]), float(sums[1])) if sums[1] else (math.nan, math.nan)
