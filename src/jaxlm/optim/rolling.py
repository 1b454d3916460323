"""The last so many values of something, as arrays: what is compared with a past without growing with it."""

import equinox as eqx
import jax
import jax.numpy as jnp


class RollingWindow(eqx.Module):
    """A ring of float32 values.

    Attributes:
        values: [capacity], in no order that matters; the first `count` of them are set.
        count: int32, values that there are.
        place: int32, where the next value goes.
    """

    values: jax.Array
    count: jax.Array
    place: jax.Array

    @staticmethod
    def empty(capacity: int) -> "RollingWindow":
        """No values yet. Traced, so that it is created on the mesh with the rest."""
        return RollingWindow(jnp.zeros(capacity, jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def with_(self, value: jax.Array) -> "RollingWindow":
        """With one value more, in the place of the oldest where it is full."""
        capacity = self.values.shape[0]
        return RollingWindow(
            self.values.at[self.place].set(value.astype(jnp.float32)),
            jnp.minimum(self.count + 1, capacity),
            (self.place + 1) % capacity,
        )

    def mean(self) -> jax.Array:
        """0 where there are none."""
        return jnp.sum(self._or_zero(self.values)) / jnp.maximum(self.count, 1)

    def deviation(self) -> jax.Array:
        """Standard deviation of the values as a population."""
        return jnp.sqrt(jnp.sum(self._or_zero(jnp.square(self.values - self.mean()))) / jnp.maximum(self.count, 1))

    def median(self) -> jax.Array:
        """nan where there are none."""
        return self._median(self.values)

    def spread(self) -> jax.Array:
        """Standard deviation as the median distance from the median tells it: what a few outliers do not move."""
        return _OF_A_NORMAL * self._median(jnp.abs(self.values - self.median()))

    def _median(self, values: jax.Array) -> jax.Array:
        return jnp.nanmedian(jnp.where(self._set(), values, jnp.nan))

    def _or_zero(self, values: jax.Array) -> jax.Array:
        return jnp.where(self._set(), values, 0.0)

    def _set(self) -> jax.Array:
        return jnp.arange(self.values.shape[0]) < self.count


# Standard deviation over median absolute deviation, of normally distributed values.
_OF_A_NORMAL = 1.4826
