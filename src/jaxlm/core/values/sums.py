"""Weighted sums and maxima, which microbatches and devices can add up, and the scores of a model's predictions."""

from dataclasses import dataclass

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


class Sum(eqx.Module):
    """A weighted sum and its total weight.

    Losses and metrics stay sums as long as possible: sums over microbatches, masked rows and devices can be added, means
    cannot.

    Attributes:
        total: scalar float32, the weighted sum.
        weight: scalar float32, the denominator of the mean.
    """

    total: jax.Array
    weight: jax.Array

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total, self.weight + other.weight)

    def mean(self) -> jax.Array:
        """total / weight; 0 if the weight is 0."""
        return self.total / jnp.where(self.weight == 0, 1.0, self.weight)

    def over_microbatches(self) -> "Sum":
        """The sum over the leading axis."""
        return Sum(jnp.sum(self.total, axis=0), jnp.sum(self.weight, axis=0))

    def logged(self) -> jax.Array:
        """The number that is logged."""
        return self.mean()


class Largest(eqx.Module):
    """The largest of some numbers, for a metric that is not a mean.

    Attributes:
        value: scalar float32.
    """

    value: jax.Array

    def over_microbatches(self) -> "Largest":
        """The largest over the leading axis."""
        return Largest(jnp.max(self.value, axis=0))

    def logged(self) -> jax.Array:
        """The number that is logged."""
        return self.value


class TokenScores(eqx.Module):
    """Says how well a model predicts each target of a batch. Every field has the axes {batch, position}.

    Attributes:
        nats: float32, negative log-likelihood of the target.
        mask: float32, 1 if the target counts.
        targets: int32, the target's token id.
        inputs: int32, the id of the token before the target.
    """

    nats: hax.NamedArray
    mask: hax.NamedArray
    targets: hax.NamedArray
    inputs: hax.NamedArray

    def sums(self) -> jax.Array:
        """float32 [2], the loss of all targets that count, and their number. Losses of the others may be anything."""
        nats, mask = (scores.rearrange(self.mask.axes).array for scores in (self.nats, self.mask))
        return jnp.stack([jnp.sum(jnp.where(mask == 0, 0.0, mask * nats)), jnp.sum(mask)])


@dataclass(frozen=True)
class DummyPrefix:
    """The space that some tokenizers put in front of every text. It is not a byte of the text.

    Attributes:
        bos_id: the token before a text.
        tokens: bool [vocab], the tokens that begin with a space.
    """

    bos_id: int
    tokens: np.ndarray
