"""Validation loss and bits per byte."""

import math
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.types import TokenBatch
from jaxlm.evals.base import Eval, EvalConfig, EvalContext
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.kernels import token_losses

# Queued batches; see engine/reports.py for why the queue must be short.
_MAX_IN_FLIGHT = 4


@EvalConfig.register_subclass("loss")
@dataclass(frozen=True)
class LossEvalConfig(EvalConfig):
    """Mean next-token loss in nats, and bits per byte, over one pass of the validation data.

    Bits per byte counts the tokens that stand for text (special tokens have no bytes and are left out of both sums) and
    divides by the bytes of the text itself, so models with different tokenizers can be compared.
    """

    def open(self, ctx: EvalContext) -> Eval:
        """Nothing is compiled before the first batch."""
        return LossEval(ctx)


class _Totals(eqx.Module):
    nats: jax.Array
    tokens: jax.Array
    text_nats: jax.Array
    text_bytes: jax.Array


class LossEval(Eval):
    """`loss` and `bpb` of the validation data."""

    def __init__(self, ctx: EvalContext):
        self._ctx = ctx
        self._cast = jax.jit(ctx.precision.to_compute)
        self._totals = jax.jit(self._batch_totals)

    def run(self, model: LanguageModel) -> dict[str, float]:
        """{} where the run has no validation data."""
        if self._ctx.validation is None:
            return {}
        model = self._cast(model)
        flying: list[_Totals] = []
        sums = np.zeros(4)
        for batch in self._ctx.validation():
            flying.append(self._totals(model, batch))
            if len(flying) >= _MAX_IN_FLIGHT:
                sums += _fetched(flying.pop(0))
        for totals in flying:
            sums += _fetched(totals)
        nats, tokens, text_nats, text_bytes = sums
        return {"loss": nats / tokens, "bpb": text_nats / math.log(2) / text_bytes}

    def _batch_totals(self, model: LanguageModel, batch: TokenBatch) -> _Totals:
        hidden = model.hidden(Inputs(batch.tokens, batch.positions, batch.segment_ids))
        nats = token_losses(hidden.final, model.lm_head(), batch.targets) * batch.loss_mask
        num_bytes = hax.named(jnp.asarray(self._ctx.token_bytes)[batch.targets.array], batch.targets.axes)
        num_bytes = num_bytes * batch.loss_mask
        is_text = num_bytes > 0
        add = lambda x: hax.sum(x.astype(jnp.float32)).scalar()  # noqa: E731
        return _Totals(add(nats), add(batch.loss_mask), add(nats * is_text), add(num_bytes))


def _fetched(totals: _Totals) -> np.ndarray:
    return np.array([float(x) for x in jax.device_get(jax.tree.leaves(totals))])
