"""The weight of the entropy, which rises while the policy is too certain.

Source: adaptive entropy control (Skywork-OR1, He et al. 2025, arXiv:2505.22312, section 4).
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

Statistics = dict[str, jax.Array]
_COEFFICIENT, _IS_LOW, _TOTAL, _COUNT = "entropy_coef", "entropy_is_low", "entropy", "entropy_tokens"


class EntropyControl(NamedTuple):
    """After each update, the coefficient goes up by `delta` if the mean entropy of its tokens was at most `target`, and down
    otherwise, between `lowest` and `highest`. It applies to the next update if the entropy was that low."""

    target: float
    start: float
    delta: float
    lowest: float
    highest: float

    def init(self) -> Statistics:
        """The statistics before the first update, to which no coefficient applies."""
        numbers = {_COEFFICIENT: self.start, _IS_LOW: 0.0, _TOTAL: 0.0, _COUNT: 0.0}
        return {name: jnp.asarray(number, jnp.float32) for name, number in numbers.items()}

    def after(self, statistics: Mapping[str, jax.Array]) -> Statistics:
        """The statistics after an update."""
        before, mean = statistics[_COEFFICIENT], statistics[_TOTAL] / jnp.maximum(statistics[_COUNT], 1.0)
        is_low = mean <= self.target
        up, down = jnp.minimum(before + self.delta, self.highest), jnp.maximum(before - self.delta, self.lowest)
        # A value that is not finite would stay in all later ones.
        is_known = jnp.isfinite(mean) & (statistics[_COUNT] > 0)
        after = jnp.where(is_known, jnp.where(is_low, up, down), before)
        flag = jnp.where(is_known, is_low.astype(jnp.float32), statistics[_IS_LOW])
        return {**self.init(), _COEFFICIENT: after, _IS_LOW: flag}


def coefficient_of(statistics: Mapping[str, jax.Array]) -> jax.Array:
    """What the entropy of a batch is weighted with, a scalar."""
    return statistics[_COEFFICIENT] * statistics[_IS_LOW]


def with_entropies(statistics: Mapping[str, jax.Array], total: jax.Array, count: jax.Array) -> Statistics:
    """The statistics with the sum of the entropies of a microbatch, and the number of its tokens."""
    total, count = (jax.lax.stop_gradient(number) for number in (total, count))
    return {**statistics, _TOTAL: statistics[_TOTAL] + total, _COUNT: statistics[_COUNT] + count}
