"""Measures how uncertain a model is: the entropy of its predictions (Shannon 1948)."""

from typing import Any, ClassVar

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.evals.base import Eval, EvalConfig, EvalContext, read_sums
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.loss import ChunkLogits, token_numbers
from jaxlm.reading.choices import choice


@choice(EvalConfig, "entropy")
class EntropyEvalConfig(EvalConfig):
    """Mean entropy in nats of the distributions that predict the targets of the validation data, over one pass of it. It logs
    `entropy`, and with several sources `<source>/entropy`. Of pairs, it reads the chosen completions.
    """

    reads_supervised: ClassVar[bool] = True
    reads_validation: ClassVar[bool] = True

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("entropy",)

    def open(self, ctx: EvalContext) -> Eval:
        return EntropyEval(ctx)


class EntropyEval(Eval):
    """The metrics of `EntropyEvalConfig`."""

    def __init__(self, ctx: EvalContext):
        self._sets = ctx.validation
        self._cast = jax.jit(ctx.precision.cast_to_compute)
        self._totals = jax.jit(_batch_totals)

    def run(self, model: LanguageModel) -> dict[str, float]:
        model = self._cast(model)
        # Of the entropies, and the number of targets.
        sums = {one.name: read_sums((self._totals(model, batch) for batch in one.batches()), 2) for one in self._sets}
        total, weight = sum(sums.values(), np.zeros(2))
        if not weight:
            return {}
        by_source = {f"{name}/entropy": float(one[0] / one[1]) for name, one in sums.items() if name and one[1]}
        return {"entropy": float(total / weight), **by_source}


def _batch_totals(model: LanguageModel, batch: Any) -> jax.Array:
    batch = batch.supervised()
    hidden = model.hidden(Inputs.of(batch)).final
    options = {"soft_cap": model.logit_soft_cap, "vocab_multiple": model.vocab_multiple}
    entropies = token_numbers(ChunkLogits.entropy, hidden, model.lm_head(), batch.targets, **options)
    return jnp.stack([hax.sum(entropies * batch.loss_mask).array, hax.sum(batch.loss_mask).array])
