"""The weight of the entropy, which may rise while the policy is too certain.

Source: adaptive entropy control (Skywork-OR1, He et al. 2025, arXiv:2505.22312, section 4).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeFloat, PositiveFloat

Statistics = dict[str, jax.Array]
_COEFFICIENT, _IS_LOW, _TOTAL, _COUNT = "entropy_coef", "entropy_is_low", "entropy", "entropy_tokens"


@dataclass(frozen=True)
class AdaptiveEntropy:
    """After each update, the coefficient goes up if the mean entropy was at most `target`, and down otherwise. It applies to
    the next update if the entropy was that low.

    Attributes:
        target: in nats.
        delta: how far the coefficient goes up or down in an update.
        min, max: its limits.
    """

    target: NonNegativeFloat
    delta: PositiveFloat = 0.005
    min: NonNegativeFloat = 0.0
    max: PositiveFloat = 1.0

    def after(self, statistics: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The coefficient after an update, and whether it applies."""
        before, mean = statistics[_COEFFICIENT], statistics[_TOTAL] / jnp.maximum(statistics[_COUNT], 1.0)
        is_low = mean <= self.target
        up, down = jnp.minimum(before + self.delta, self.max), jnp.maximum(before - self.delta, self.min)
        # A value that is not finite would stay in all later ones.
        is_known = jnp.isfinite(mean) & (statistics[_COUNT] > 0)
        coefficient = jnp.where(is_known, jnp.where(is_low, up, down), before)
        return coefficient, jnp.where(is_known, is_low.astype(jnp.float32), statistics[_IS_LOW])


@dataclass(frozen=True)
class Entropy:
    """The mean entropy of the tokens that the policy loss counts, which is maximized.

    Attributes:
        coef: its weight; 0 disables it, unless it adapts.
        adaptive: change the weight after each update, from `coef` on; null keeps it fixed.
    """

    coef: NonNegativeFloat = 0.0
    adaptive: AdaptiveEntropy | None = None

    def __post_init__(self):
        if self.adaptive is not None and not self.adaptive.min <= self.coef <= self.adaptive.max:
            raise ConfigError(
                f"objective.entropy.coef: {self.coef:g} given, from adaptive.min ({self.adaptive.min:g}) to adaptive.max"
                f" ({self.adaptive.max:g}) expected, because the coefficient starts there. Change one of them"
            )

    @property
    def has_weight(self) -> bool:
        return self.coef > 0 or self.adaptive is not None

    def init(self) -> Statistics:
        """The statistics before the first update, to which no coefficient that adapts applies."""
        names = (_COEFFICIENT, _IS_LOW, _TOTAL, _COUNT) if self.adaptive else ()
        return {name: jnp.asarray(self.coef if name == _COEFFICIENT else 0.0, jnp.float32) for name in names}

    def after(self, statistics: Statistics) -> Statistics:
        """The statistics after an update."""
        if self.adaptive is None:
            return statistics
        return self.init() | dict(zip((_COEFFICIENT, _IS_LOW), self.adaptive.after(statistics), strict=True))


def coefficient_of(statistics: Mapping[str, jax.Array]) -> jax.Array:
    """What the entropy of a batch is weighted with, a scalar."""
    return statistics[_COEFFICIENT] * statistics[_IS_LOW]


def with_entropies(statistics: Mapping[str, jax.Array], total: jax.Array, count: jax.Array) -> Statistics:
    """The statistics with the sum of the entropies of a microbatch, and the number of its tokens."""
    total, count = (jax.lax.stop_gradient(number) for number in (total, count))
    return {**statistics, _TOTAL: statistics[_TOTAL] + total, _COUNT: statistics[_COUNT] + count}
