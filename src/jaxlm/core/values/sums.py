"""Weighted sums and maxima, which microbatches and devices can add up."""

import equinox as eqx
import jax
import jax.numpy as jnp


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
