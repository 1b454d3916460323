"""The slope of the most recent values, and how sure it is."""

import jax
import jax.numpy as jnp

from jaxlm.optim.rolling import RollingWindow


def slope(window: RollingWindow) -> tuple[jax.Array, jax.Array]:
    """The slope per value of the least-squares line through the values, and its standard error. Both are 0 for fewer than 3.

    The values are summed anew each time: differences of running sums would lose their digits.
    """
    capacity = window.values.shape[0]
    is_set = jnp.arange(capacity) < window.count
    count = jnp.maximum(window.count, 3).astype(jnp.float32)
    age = (window.place - 1 - jnp.arange(capacity)) % capacity
    x = jnp.where(is_set, (count - 1) / 2 - age, 0.0)
    y = jnp.where(is_set, window.values - window.mean(), 0.0)
    sum_squares = count * (count**2 - 1) / 12
    rise = jnp.sum(x * y) / sum_squares
    variance = jnp.sum(jnp.where(is_set, jnp.square(y - rise * x), 0.0)) / jnp.maximum(count - 2, 1)
    has_slope = window.count >= 3
    return jnp.where(has_slope, rise, 0.0), jnp.where(has_slope, jnp.sqrt(variance / sum_squares), 0.0)
