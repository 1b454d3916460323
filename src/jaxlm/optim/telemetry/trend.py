"""The trend of a number that changes slowly, such as the loss: outliers in units of its own noise, and its slope.

Source: the trend is Brown's double exponential smoothing (Smoothing, Forecasting and Prediction of Discrete Time Series,
1963) as discounted least squares, which is exact from the first value; the scale is the median absolute residual (Huber,
Robust Statistics, 1981, section 5.1). Residuals are winsorized before either learns from them.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.optim.bad_steps import STD_PER_MAD, RollingWindow

_DISCOUNT = 0.95  # of a residual's weight, with each value
_RESTART_AFTER = 10  # outliers in a row


class Judged(NamedTuple):
    """What a trend says about a value.

    Attributes:
        score: float32, the residual in robust standard deviations; 0 before there are enough values, infinity for a value
            that is not finite.
        value: float32, the value that the trend has learned: at most `limit` standard deviations from what was expected.
    """

    score: jax.Array
    value: jax.Array


class Trend(eqx.Module):
    """A line through recent values, of which older ones weigh less, and the size of the residuals.

    After 10 outliers in a row, the line starts over from the newest value: the level has changed for good. So a change of the
    level counts as at most 10 outliers.

    Attributes:
        level: float32, the line at the newest value.
        slope: float32, its change per value.
        moments: float32 [3], sums over the values of their weights, times their age to the power of 0, 1 and 2.
        residuals: their absolute values, winsorized.
        in_a_row: int32, number of outliers since the last value that was none.
    """

    level: jax.Array
    slope: jax.Array
    moments: jax.Array
    residuals: RollingWindow
    in_a_row: jax.Array

    @staticmethod
    def empty(window: int) -> "Trend":
        """The trend of no values. Call it in traced code, so that it is created on the mesh.

        Args:
            window: number of residuals that tell the scale.
        """
        zero = jnp.zeros(())
        # One value has no slope: a weight that vanishes soon says that it is 0.
        moments = jnp.asarray([0.0, 0.0, 1.0])
        return Trend(zero, zero, moments, RollingWindow.empty(window), jnp.zeros((), jnp.int32))

    def push(
        self, value: jax.Array, *, limit: float, min_values: int, smallest_scale: jax.Array | float
    ) -> "tuple[Trend, Judged]":
        """The trend with one more value, and what the trend from before says about it.

        A value that is not finite changes nothing.

        Args:
            limit: scores beyond it, on either side, are outliers.
            min_values: the number of values before the first that can be an outlier.
            smallest_scale: lower bound of the standard deviation.
        """
        finite = jnp.isfinite(value)
        expected = self.level + self.slope
        residual = jnp.where(finite, value - expected, 0.0)
        is_ready = self.residuals.count >= min_values
        median = jnp.where(self.residuals.count > 0, self.residuals.median(), 0.0)
        scale = jnp.maximum(STD_PER_MAD * median, smallest_scale)
        is_outlier = is_ready & (jnp.abs(residual) > limit * scale)
        clipped = jnp.where(is_outlier, jnp.sign(residual) * limit * scale, residual)
        in_a_row = jnp.where(is_outlier, self.in_a_row + 1, 0)
        restarts = in_a_row >= _RESTART_AFTER

        s0, s1, s2 = self.moments
        s0, s1, s2 = 1 + _DISCOUNT * s0, _DISCOUNT * (s1 + s0), _DISCOUNT * (s2 + 2 * s1 + s0)
        determinant = s0 * s2 - s1**2
        learned = Trend(
            jnp.where(restarts, value, expected + s2 / determinant * clipped),
            jnp.where(restarts, 0.0, self.slope + s1 / determinant * clipped),
            jnp.stack([s0, s1, s2]),
            self.residuals.push(jnp.abs(clipped)),
            jnp.where(restarts, 0, in_a_row),
        )
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), learned, self)
        score = jnp.where(finite, jnp.where(is_ready, residual / scale, 0.0), jnp.inf)
        return after, Judged(score, jnp.where(restarts, value, expected + clipped))


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
