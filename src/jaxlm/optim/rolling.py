"""Recent values of a scalar: the last ones in a window, or their mean, in which older ones weigh less."""

import equinox as eqx
import jax
import jax.numpy as jnp

STD_PER_MAD = 1.4826  # standard deviation of a normal distribution divided by its median absolute deviation


class RollingWindow(eqx.Module):
    """A ring buffer of float32 values.

    Attributes:
        values: [capacity]; the first `count` entries are set. Their order does not matter.
        count: int32, number of values stored.
        place: int32, index at which to write the next value.
    """

    values: jax.Array
    count: jax.Array
    place: jax.Array

    @staticmethod
    def empty(capacity: int) -> "RollingWindow":
        """An empty window. Call it in traced code, so that the window is created on the mesh."""
        return RollingWindow(jnp.zeros(capacity, jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def push(self, value: jax.Array) -> "RollingWindow":
        """Returns a window with one more value. In a full window it replaces the oldest."""
        capacity = self.values.shape[0]
        return RollingWindow(
            self.values.at[self.place].set(value.astype(jnp.float32)),
            jnp.minimum(self.count + 1, capacity),
            (self.place + 1) % capacity,
        )

    def mean(self) -> jax.Array:
        """Mean of the values; 0 if the window is empty."""
        return jnp.sum(self._or_zero(self.values)) / jnp.maximum(self.count, 1)

    def std(self) -> jax.Array:
        """Population standard deviation of the values; 0 if the window is empty."""
        return jnp.sqrt(jnp.sum(self._or_zero(jnp.square(self.values - self.mean()))) / jnp.maximum(self.count, 1))

    def median(self) -> jax.Array:
        """Median of the values; NaN if the window is empty."""
        return self._median(self.values)

    def robust_std(self) -> jax.Array:
        """Standard deviation estimated from the median absolute deviation, which a few outliers do not affect."""
        return STD_PER_MAD * self._median(jnp.abs(self.values - self.median()))

    def _median(self, values: jax.Array) -> jax.Array:
        return jnp.nanmedian(jnp.where(self._is_set(), values, jnp.nan))

    def _or_zero(self, values: jax.Array) -> jax.Array:
        return jnp.where(self._is_set(), values, 0.0)

    def _is_set(self) -> jax.Array:
        return jnp.arange(self.values.shape[0]) < self.count


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
