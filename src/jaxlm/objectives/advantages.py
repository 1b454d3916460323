"""Advantages: how much better each response is than the others of its group, from their rewards.

Source: GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2); the variants name their own papers.

Shapes: G responses of a prompt, K rewards.
"""

import abc
from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Interval

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveFloat, PositiveInt
from jaxlm.reading.choices import NamedChoice, choice


@dataclass(frozen=True)
class Advantage(NamedChoice, abc.ABC):
    """How advantages are computed.

    Attributes:
        std_ddof: what is subtracted from the number of responses in the variance: 0, or 1 as in TRL, verl and Tunix.
    """

    std_ddof: Annotated[int, Interval(ge=0, le=1)] = 0


@dataclass(frozen=True)
class OfSum(Advantage, abc.ABC):
    """Of the sum of the rewards.

    Attributes:
        baseline: subtract the `mean` of the group from the rewards, or that of the others: `leave_one_out` (RLOO, Ahmadian et
            al. 2024, arXiv:2402.14740, equation 6).
    """

    baseline: Literal["mean", "leave_one_out"] = "mean"

    @abc.abstractmethod
    def of(self, rewards: jax.Array, std_of_batch: jax.Array | None = None) -> jax.Array:
        """The advantage of each response, float32 [..., G]. Args: rewards: [..., G]; std_of_batch: see `OfBatch.std`."""

    def centered(self, rewards: jax.Array) -> jax.Array:
        """The rewards without the baseline."""
        size, centered = rewards.shape[-1], _centered(rewards)
        return centered * size / (size - 1) if self.baseline == "leave_one_out" else centered


@choice(Advantage, "group")
class OfGroup(OfSum):
    """Divided by the standard deviation of the rewards of the group.

    Attributes:
        eps: added to the standard deviation. TRL has 1e-4, verl and Tunix 1e-6.
    """

    eps: PositiveFloat = 1e-8

    def of(self, rewards: jax.Array, std_of_batch: jax.Array | None = None) -> jax.Array:
        return self.centered(rewards) / (group_std(rewards, self.std_ddof)[..., None] + self.eps)


@choice(Advantage, "batch")
class OfBatch(OfSum):
    """Divided by a standard deviation over the whole batch.

    Attributes:
        std_of: that of the `rewards` (Liu et al. 2025, "Tricks or Traps? A Deep Dive into RL for LLM Reasoning",
            arXiv:2508.08221), or of the `advantages` before the division (REINFORCE++, Hu 2025, arXiv:2501.03262).
        eps: added to the standard deviation. TRL has 1e-4, verl and Tunix 1e-6.
    """

    std_of: Literal["rewards", "advantages"] = "rewards"
    eps: PositiveFloat = 1e-8

    def of(self, rewards: jax.Array, std_of_batch: jax.Array | None = None) -> jax.Array:
        assert std_of_batch is not None, "the scale is that of the whole batch"
        return self.centered(rewards) / (std_of_batch + self.eps)

    def std(self, rewards: jax.Array, is_response: jax.Array) -> jax.Array:
        """The standard deviation, a scalar. Args: is_response: bool [..., G]; others are padding."""
        values = self.centered(rewards) if self.std_of == "advantages" else rewards
        count = jnp.sum(is_response, dtype=jnp.float32)
        mean = jnp.sum(jnp.where(is_response, values, 0.0)) / jnp.maximum(count, 1.0)
        squares = jnp.where(is_response, (values - mean) ** 2, 0.0)
        return jnp.sqrt(jnp.sum(squares) / jnp.maximum(count - self.std_ddof, 1.0))


@choice(Advantage, "unscaled")
class Unscaled(OfSum):
    """Not divided: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, section 3.2)."""

    def of(self, rewards: jax.Array, std_of_batch: jax.Array | None = None) -> jax.Array:
        return self.centered(rewards)


@choice(Advantage, "normalize_then_sum")
class NormalizeThenSum(Advantage):
    """Rewards with small differences count as much as those with large ones: each is normalized in its group, and their
    weighted sum in the batch.

    Source: GDPO (Liu et al. 2026, "Group reward-Decoupled Normalization Policy Optimization", arXiv:2601.05242).

    Attributes:
        eps: added to standard deviations. TRL has 1e-4.
    """

    eps: PositiveFloat = 1e-8

    def of_batch(self, parts_GK: jax.Array, weights_K: jax.Array, is_response_G: jax.Array) -> jax.Array:
        """The advantages of a whole batch, float32 [..., G].

        Args:
            parts_GK: [..., G, K], NaN where a reward does not apply. A response to which none applies has no advantage.
            is_response_G: bool [..., G]; others are padding.
        """
        applies_GK = ~jnp.isnan(parts_GK) & is_response_G[..., None]
        normalized_GK = self._normalized(parts_GK, applies_GK, -2)
        return self._normalized(jnp.sum(normalized_GK * weights_K, axis=-1), jnp.any(applies_GK, axis=-1), None)

    def _normalized(self, values: jax.Array, counts: jax.Array, axis: int | None) -> jax.Array:
        """Values with mean 0 and standard deviation 1 over an axis, or over all; 0 where they do not count."""
        values = jnp.where(counts, values, 0.0)
        number = jnp.sum(counts, axis=axis, keepdims=True, dtype=jnp.float32)
        mean = jnp.sum(values, axis=axis, keepdims=True) / jnp.maximum(number, 1.0)
        lowest = jnp.min(jnp.where(counts, values, jnp.inf), axis=axis, keepdims=True)
        highest = jnp.max(jnp.where(counts, values, -jnp.inf), axis=axis, keepdims=True)
        # The mean of equal values may be rounded.
        centered = jnp.where(counts & (lowest < highest), values - mean, 0.0)
        variance = jnp.sum(centered**2, axis=axis, keepdims=True) / jnp.maximum(number - self.std_ddof, 1.0)
        return centered / (jnp.sqrt(variance) + self.eps)


@dataclass(frozen=True)
class Overlong:
    """Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13).

    Attributes:
        cache: from this many tokens before `max_response_tokens` on, up to 1 is subtracted from the reward.
        max_response_tokens: length from which on 1 is subtracted.
    """

    cache: PositiveInt
    max_response_tokens: PositiveInt

    def __post_init__(self):
        if self.cache > self.max_response_tokens:
            raise ConfigError(
                f"objective.overlong.cache: {self.cache} given, at most max_response_tokens ({self.max_response_tokens})"
                " expected. Lower it"
            )

    def penalties(self, lengths: jax.Array) -> jax.Array:
        """What is added to each reward, float32: from 0 to -1. Args: lengths: in tokens."""
        return jnp.clip((self.max_response_tokens - self.cache - lengths.astype(jnp.float32)) / self.cache, -1.0, 0.0)


def group_std(rewards: jax.Array, std_ddof: int) -> jax.Array:
    """The standard deviation of each group's rewards, float32 [...]. Args: rewards: [..., G]."""
    return jnp.sqrt(jnp.sum(_centered(rewards) ** 2, axis=-1) / (rewards.shape[-1] - std_ddof))


def _centered(rewards: jax.Array) -> jax.Array:
    """Rewards without the mean of their group; exactly 0 in a group of equal rewards, whose mean may be rounded."""
    rewards = rewards.astype(jnp.float32)
    centered = rewards - jnp.mean(rewards, axis=-1, keepdims=True)
    are_equal = jnp.max(rewards, axis=-1, keepdims=True) == jnp.min(rewards, axis=-1, keepdims=True)
    return jnp.where(are_equal, 0.0, centered)
