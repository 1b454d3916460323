"""Measures how often a model prefers the chosen completion of a pair.

Source: the likelihoods in equation 3 of Rafailov et al. 2023, Direct Preference Optimization (arXiv:2305.18290), without a
reference model.
"""

from collections.abc import Iterator
from typing import ClassVar

import haliax as hax
import jax
import jax.numpy as jnp

from jaxlm.core.axes import POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import PairBatch
from jaxlm.evals.base import Eval, EvalConfig, EvalContext, EvalMetrics, EvalScope
from jaxlm.evals.batches import read_sums
from jaxlm.models.base import LanguageModel
from jaxlm.reading.choices import choice


@choice(EvalConfig, "preference")
class PreferenceEvalConfig(EvalConfig):
    """Compares the log-likelihoods of both completions of each validation pair, for `data.type: pairs`. It logs
    `preference/accuracy` (the fraction of pairs whose chosen completion is more likely), `preference/margin` (the mean
    difference in nats), and the mean log-likelihoods `logps/chosen` and `logps/rejected`. Log-likelihoods are sums over the
    tokens of a completion.
    """

    metrics: ClassVar[EvalMetrics] = EvalMetrics(
        ("preference/accuracy", "preference/margin", "logps/chosen", "logps/rejected")
    )
    scope: ClassVar[EvalScope] = EvalScope(validation=True, next_tokens=True)

    def open(self, ctx: EvalContext) -> Eval:
        return PreferenceEval(ctx)


class PreferenceEval(Eval):
    """The metrics of `PreferenceEvalConfig`, over all sources."""

    def __init__(self, ctx: EvalContext):
        self._ctx = ctx
        self._totals = jax.jit(self._batch_totals)

    def run(self, model: LanguageModel) -> dict[str, float]:
        model = self._ctx.cast(model)
        num_pairs, *totals = read_sums((self._totals(model, batch) for batch in self._batches()), 4).tolist()
        if not num_pairs:
            return {}
        accuracy, chosen, rejected = (total / num_pairs for total in totals)
        return {
            "preference/accuracy": accuracy,
            "preference/margin": chosen - rejected,
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }

    def _batches(self) -> Iterator[PairBatch]:
        for batch in self._ctx.batches():
            if not isinstance(batch, PairBatch):
                raise ConfigError(
                    "evals: type preference needs pairs to validate on. Set data.type to pairs, or remove it"
                )
            yield batch

    def _batch_totals(self, model: LanguageModel, batch: PairBatch) -> jax.Array:
        """float32 [4]: pairs, pairs with the chosen completion ahead, and the log-likelihoods of both sides."""
        scores = [self._ctx.score(model, batch.half(number)) for number in (0, 1)]
        chosen, rejected = (-hax.sum(s.nats * s.mask, POSITION).array for s in scores)
        is_pair = hax.any(scores[0].mask > 0, POSITION).array
        ahead = is_pair & (chosen > rejected)
        columns = (is_pair, ahead, jnp.where(is_pair, chosen, 0.0), jnp.where(is_pair, rejected, 0.0))
        return jnp.stack([jnp.sum(column, dtype=jnp.float32) for column in columns])
