"""The loop over the microbatches of a batch: sums losses, metrics and gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp

from jaxlm.core.axes import MICROBATCH
from jaxlm.core.sharding import Layout, at_rest
from jaxlm.core.tree import is_named
from jaxlm.objectives.base import Metrics


class Sums(eqx.Module):
    """Sums over the microbatches of a batch.

    Attributes:
        gradient: of the scaled loss.
        objective: float32, the loss.
        slot: the objective's state after the last microbatch.
    """

    gradient: Any
    objective: jax.Array
    metrics: Metrics
    slot: Any


@dataclass(frozen=True)
class MicrobatchLoss:
    """The loss of a microbatch, as a part of its batch.

    Attributes:
        annotate: (slot, microbatch) -> microbatch. Has no gradient.
        scaled: (parameters, microbatch, slot, number of the microbatch) -> (scaled loss, (loss, metrics, slot)).
    """

    annotate: Callable[[Any, Any], Any]
    scaled: Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, tuple[jax.Array, Metrics, Any]]]


Accumulate = Callable[[MicrobatchLoss, Any, Any, Any, Any, Layout], Sums]
"""(loss, parameters, their gradient's zeros, batch {microbatch, batch, ...}, slot, layout) -> sums. The step is given one, so
that a pipeline can run the microbatches in another order."""


def accumulate(loss: MicrobatchLoss, parameters: Any, zeros: Any, batch: Any, slot: Any, layout: Layout) -> Sums:
    """Runs one microbatch after another, and keeps one gradient.

    Args:
        parameters: the trainable ones, in the dtypes of the computation.
        zeros: with the structure of the parameters, in the dtypes of sums (`core.tree.sum_dtype`).
    """

    def one(carry: tuple[Any, Any], microbatch: Any, number: jax.Array):
        gradient, slot = carry
        microbatch = loss.annotate(slot, microbatch)
        value_and_grad = jax.value_and_grad(loss.scaled, has_aux=True)
        (_, (total, metrics, slot)), new = value_and_grad(parameters, microbatch, slot, number)
        gradient = jax.tree.map(lambda sum_, g: sum_ + g.astype(sum_.dtype), gradient, new)
        return (at_rest(gradient, layout), slot), (total, metrics)

    Microbatch = microbatch_axis(batch)
    (gradient, slot), (totals, metrics) = hax.scan(one, Microbatch)(
        (at_rest(zeros, layout), slot), batch, jnp.arange(Microbatch.size)
    )
    metrics = {name: metric.over_microbatches() for name, metric in metrics.items()}
    return Sums(gradient, jnp.sum(totals, axis=0), metrics, slot)


def microbatch_axis(batch: Any) -> hax.Axis:
    """The microbatch axis, the first axis of every column of a training batch."""
    column = next(leaf for leaf in jax.tree.leaves(batch, is_leaf=is_named) if is_named(leaf))
    return column.resolve_axis(MICROBATCH)
