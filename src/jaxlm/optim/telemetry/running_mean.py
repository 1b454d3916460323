"""A running mean without a bias towards its start."""

import equinox as eqx
import jax
import jax.numpy as jnp


class RunningMean(eqx.Module):
    """An exponential moving average, divided by the sum of its weights as in Adam: after one value, it is that value.

    Attributes:
        total: float32, the weighted sum of the values.
        weight: float32, the sum of their weights; approaches 1.
    """

    total: jax.Array
    weight: jax.Array

    @staticmethod
    def empty() -> "RunningMean":
        """The mean of no values. Call it in traced code, so that it is created on the mesh."""
        return RunningMean(jnp.zeros(()), jnp.zeros(()))

    def push(self, value: jax.Array, num_steps: int) -> "RunningMean":
        """Returns the mean with one more value, with a weight of `1 / num_steps`. What is not finite changes nothing."""
        rate = 1 / num_steps
        pushed = RunningMean(self.total + rate * (value - self.total), self.weight + rate * (1 - self.weight))
        return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(value), new, old), pushed, self)

    def mean(self) -> jax.Array:
        """The mean; 0 without values."""
        return self.total / jnp.where(self.weight > 0, self.weight, 1.0)
