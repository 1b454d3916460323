"""Log-likelihoods of completions, and the reference that an objective keeps in its state."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import POSITION
from jaxlm.core.tree import is_named
from jaxlm.core.types import TokenBatch
from jaxlm.models.base import AuxLoss, Inputs, LanguageModel
from jaxlm.models.loss import token_losses

INITIAL, NO_REFERENCE = "initial", "none"
"""References that are not in the section `refs`."""


def token_logps(
    model: LanguageModel, batch: TokenBatch, *, key: jax.Array | None = None
) -> tuple[NamedArray, Mapping[str, AuxLoss]]:
    """The log-likelihood of each target, float32 {batch, position}, 0 where the loss mask is, and the layers' losses.

    Differentiable, without the logits of all tokens in memory.
    """
    hidden = model.hidden(Inputs(batch.tokens, batch.positions, batch.segment_ids), key=key)
    options = {"soft_cap": model.logit_soft_cap, "vocab_multiple": model.vocab_multiple}
    nats = token_losses(hidden.final, model.lm_head(), batch.targets, **options)
    return -hax.where(batch.loss_mask > 0, nats, 0.0), hidden.aux


def completion_logps(
    model: LanguageModel, batch: TokenBatch, *, key: jax.Array | None = None
) -> tuple[NamedArray, Mapping[str, AuxLoss]]:
    """The log-likelihood of each completion, which the loss mask selects, float32 {batch}, and the layers' losses."""
    logps, aux = token_logps(model, batch, key=key)
    return hax.sum(logps * batch.loss_mask, POSITION), aux


class HeldReference(eqx.Module):
    """A reference in the state of an objective: the model from the start of the phase, or from the last sync.

    Attributes:
        weights: the leaves that train, in the dtypes of the computation; None for the others, which never change.
    """

    weights: Any

    def model(self, model: LanguageModel) -> LanguageModel:
        """The reference. Args: model: the model that trains, for its frozen leaves."""
        return eqx.combine(self.weights, model, is_leaf=is_named)

    def synced(self, trainable: Any, updates: jax.Array, interval: int, mixup: float) -> "HeldReference":
        """The reference after an update: every `interval` updates, it moves by the fraction `mixup` to `trainable`.

        Source: Gorbatovski et al. 2024 (arXiv:2404.09656), equations 6 and 7.
        """
        if not interval:
            return self
        is_due = updates % interval == 0

        def moved(ours: jax.Array, theirs: jax.Array) -> jax.Array:
            new = theirs if mixup == 1 else ours.astype(jnp.float32) * (1 - mixup) + theirs.astype(jnp.float32) * mixup
            return jnp.where(is_due, new.astype(ours.dtype), ours)

        return HeldReference(jax.tree.map(moved, self.weights, trainable))
