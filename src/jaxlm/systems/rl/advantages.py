"""What GRPO makes of rewards: advantages, the tokens that have them, and the weight of the entropy.

Advantages say how much better each response is than the others of its group. The weight of the entropy may rise while the
policy is too certain.

Source: GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2), the variants name their own papers; adaptive entropy
control (Skywork-OR1, He et al. 2025, arXiv:2505.22312, section 4).

Shapes: G responses of a prompt, K rewards.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import draccus
import jax
import jax.numpy as jnp
from annotated_types import Interval
from haliax import NamedArray

from jaxlm.core.axes import BATCH, GROUP, POSITION
from jaxlm.core.field_types import NonNegativeFloat, PositiveFloat, PositiveInt
from jaxlm.core.rules import Rules, ordered
from jaxlm.core.values.batch_types import GroupBatch
from jaxlm.core.values.sums import Largest, Sum
from jaxlm.objectives.base import Metrics
from jaxlm.reading.choices import Registry, choice


@dataclass(frozen=True)
class Advantage(Registry, draccus.ChoiceRegistry, abc.ABC, by_name=True):
    """Defines how advantages are computed.

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

    key_rules: ClassVar[Rules] = (ordered("cache", "max_response_tokens"),)

    def penalties(self, lengths: jax.Array) -> jax.Array:
        """Returns what is added to each reward, float32: from 0 to -1. Args: lengths: in tokens."""
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


class ResponseTokens(NamedTuple):
    """Numbers of the tokens of all responses, float32 [N, S] each; None if they are unknown.

    Attributes:
        logps, entropy: of the model that trains.
        mask: 1 for a token of a response.
        counted: 1 for a token that the policy loss counts.
        old: log-likelihoods under the model that the ratios compare with.
        reference, sampler: log-likelihoods under the reference and as the sampler has recorded them.
    """

    logps: jax.Array
    entropy: jax.Array
    mask: jax.Array
    counted: jax.Array
    old: jax.Array
    reference: jax.Array | None
    sampler: jax.Array | None

    @property
    def sampled(self) -> jax.Array:
        """Log-likelihoods under the model that sampled the responses, as recorded if they are: `old` may be our own."""
        return self.old if self.sampler is None else self.sampler


def reward_metrics(rewards_BG: jax.Array, shaped_BG: jax.Array, batch: GroupBatch, std_ddof: int) -> Metrics:
    """Means over responses and groups, without padding. Args: shaped_BG: what the advantages are computed from."""
    mask_BGS = batch.responses.loss_mask.rearrange((BATCH, GROUP, POSITION)).array
    has_tokens_BG = jnp.any(mask_BGS > 0, axis=-1).astype(jnp.float32)
    is_group_B = jnp.max(has_tokens_BG, axis=-1)
    num_groups, num_responses = jnp.sum(is_group_B), jnp.sum(has_tokens_BG)
    std_B = group_std(shaped_BG, std_ddof)
    return {
        "reward": Sum(jnp.sum(rewards_BG * has_tokens_BG), num_responses),
        "reward_std": Sum(jnp.sum(std_B * is_group_B), num_groups),
        "frac_reward_zero_std": Sum(jnp.sum((std_B == 0) * is_group_B), num_groups),
        "completions/mean_length": Sum(jnp.sum(mask_BGS > 0, dtype=jnp.float32), num_responses),
    }


def sampler_metrics(tokens: ResponseTokens) -> Metrics:
    """Measures how far our log-likelihoods are from the sampler's, which had the same weights in the first update."""
    if tokens.sampler is None:
        return {}
    distance_NS = jnp.where(tokens.mask > 0, jnp.abs(jax.lax.stop_gradient(tokens.logps) - tokens.sampler), 0.0)
    return {
        "sampling/logp_diff_mean": Sum(jnp.sum(distance_NS), jnp.sum(tokens.mask > 0, dtype=jnp.float32)),
        "sampling/logp_diff_max": Largest(jnp.max(distance_NS)),
    }


def by_sequence(of_group: NamedArray) -> jax.Array:
    """[N, S]: {batch, group, position} in the order of `GroupBatch.sequences`."""
    array = of_group.rearrange((BATCH, GROUP, POSITION)).array
    return array.reshape(-1, array.shape[-1])


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

    key_rules: ClassVar[Rules] = (
        ordered("adaptive.min", "coef", "adaptive.max", why="and the coefficient starts there"),
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
    """Returns what the entropy of a batch is weighted with, a scalar."""
    return statistics[_COEFFICIENT] * statistics[_IS_LOW]


def with_entropies(statistics: Mapping[str, jax.Array], total: jax.Array, count: jax.Array) -> Statistics:
    """The statistics with the sum of the entropies of a microbatch, and the number of its tokens."""
    total, count = (jax.lax.stop_gradient(number) for number in (total, count))
    return {**statistics, _TOTAL: statistics[_TOTAL] + total, _COUNT: statistics[_COUNT] + count}
