"""Policy gradients on sampled responses: advantages, probability ratios, clipping, KL estimators and averages.

Source: PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7) with the advantages of GRPO (Shao et al. 2024,
arXiv:2402.03300, section 4.1); the variants name their own papers.

Shapes: N responses, S positions.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp

Scale = Literal["group", "none"]
Baseline = Literal["mean", "leave_one_out"]
Level = Literal["token", "sequence"]
Average = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"]


def group_advantages(
    rewards: jax.Array, *, scale: Scale = "group", baseline: Baseline = "mean", std_ddof: int = 0, eps: float = 1e-8
) -> jax.Array:
    """The advantage of each response over the others of its group, float32 [..., group].

    Source: Shao et al. 2024 (arXiv:2402.03300), section 4.1.2. Without `scale`: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783,
    section 3.2). `leave_one_out`: RLOO (Ahmadian et al. 2024, arXiv:2402.14740, equation 6).

    Args:
        rewards: [..., group].
        scale: whether advantages are divided by the group's standard deviation.
        baseline: what is subtracted: the mean of the group, or that of the other responses.
        std_ddof: 0 divides the sum of squares by the number of responses, 1 by one less.
        eps: added to the standard deviation.
    """
    size, centered = rewards.shape[-1], _centered(rewards)
    advantages = centered * size / (size - 1) if baseline == "leave_one_out" else centered
    return advantages / (group_std(rewards, std_ddof)[..., None] + eps) if scale == "group" else advantages


def group_std(rewards: jax.Array, std_ddof: int) -> jax.Array:
    """The standard deviation of each group's rewards, float32 [...]. Args: rewards: [..., group]."""
    return jnp.sqrt(jnp.sum(_centered(rewards) ** 2, axis=-1) / (rewards.shape[-1] - std_ddof))


def _centered(rewards: jax.Array) -> jax.Array:
    """Rewards without the mean of their group; exactly 0 in a group of equal rewards, whose mean may be rounded."""
    rewards = rewards.astype(jnp.float32)
    centered = rewards - jnp.mean(rewards, axis=-1, keepdims=True)
    are_equal = jnp.max(rewards, axis=-1, keepdims=True) == jnp.min(rewards, axis=-1, keepdims=True)
    return jnp.where(are_equal, 0.0, centered)


def log_ratios(logps_NS: jax.Array, others_NS: jax.Array, mask_NS: jax.Array, level: Level) -> jax.Array:
    """How much more likely each token is than for another model, as a logarithm, float32 [N, S].

    With `sequence`, every token has the mean of its response: the ratio is that of the whole responses, normalized by length.
    Source: GSPO (Zheng et al. 2025, arXiv:2507.18071, equation 7).
    """
    ratios_NS = jnp.where(mask_NS > 0, logps_NS - others_NS, 0.0)
    if level == "token":
        return ratios_NS
    mean_N = jnp.sum(ratios_NS * mask_NS, axis=1) / jnp.maximum(jnp.sum(mask_NS, axis=1), 1.0)
    return jnp.broadcast_to(mean_N[:, None], ratios_NS.shape)


def clipped_losses(
    log_ratio_NS: jax.Array, advantage_N: jax.Array, low: float, high: float, dual_clip: float | None = None
) -> jax.Array:
    """PPO's clipped loss of each token, float32 [N, S].

    Source: Schulman et al. 2017 (arXiv:1707.06347), equation 7. A larger upper limit: DAPO (Yu et al. 2025, arXiv:2503.14476,
    section 3.1). `dual_clip`, the largest loss of a negative advantage in units of it: Ye et al. 2020 (arXiv:1912.09729),
    equation 6.
    """
    ratio_NS, advantage_N1 = jnp.exp(log_ratio_NS), advantage_N[:, None]
    clipped_NS = jnp.clip(ratio_NS, 1 - low, 1 + high)
    losses_NS = jnp.maximum(-ratio_NS * advantage_N1, -clipped_NS * advantage_N1)
    if dual_clip is None:
        return losses_NS
    return jnp.where(advantage_N1 < 0, jnp.minimum(losses_NS, -dual_clip * advantage_N1), losses_NS)


def cispo_losses(log_ratio_NS: jax.Array, logps_NS: jax.Array, advantage_N: jax.Array, cap: float) -> jax.Array:
    """CISPO's loss of each token, float32 [N, S]: the ratio, at most `cap`, is a weight without a gradient.

    Source: MiniMax-M1 (Chen et al. 2025, arXiv:2506.13585), equation 4.
    """
    weight_NS = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio_NS), cap))
    return -weight_NS * advantage_N[:, None] * logps_NS


def truncated_weights(logps_NS: jax.Array, sampler_NS: jax.Array, mask_NS: jax.Array, cap: float) -> jax.Array:
    """How much more likely each token is than for the sampler, at most `cap`, without a gradient, float32 [N, S].

    Source: truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"), for a sampler that computes other probabilities than the trainer.
    """
    log_ratio_NS = jnp.where(mask_NS > 0, logps_NS - sampler_NS, 0.0)
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio_NS), cap))


def overlong_penalties(lengths: jax.Array, max_tokens: int, cache: int) -> jax.Array:
    """What is added to the reward of a long response, float32: from 0 at `max_tokens - cache` tokens to -1 at `max_tokens`.

    Source: soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13).
    """
    return jnp.clip((max_tokens - cache - lengths.astype(jnp.float32)) / cache, -1.0, 0.0)


_SATURATED = 80.0


def sapo_losses(
    log_ratio_NS: jax.Array, advantage_N: jax.Array, positive_temperature: float, negative_temperature: float
) -> jax.Array:
    """SAPO's loss of each token, float32 [N, S]: a sigmoid of the ratio instead of the clipped ratio, of slope 1 at 1.

    Source: Gao et al. 2025, "Soft Adaptive Policy Optimization" (arXiv:2511.20347).
    """
    advantage_N1 = advantage_N[:, None]
    temperature_N1 = jnp.where(advantage_N1 > 0, positive_temperature, negative_temperature)
    log_ratio_NS = jnp.minimum(log_ratio_NS, _SATURATED)  # infinity times the slope of 0 would be NaN
    gate_NS = jax.nn.sigmoid(temperature_N1 * jnp.expm1(log_ratio_NS)) * 4 / temperature_N1
    return -gate_NS * advantage_N1


def _k3(log_ratio: jax.Array) -> jax.Array:
    return jnp.expm1(-log_ratio) + log_ratio


KL_ESTIMATORS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio**2 / 2,
    "k3": _k3,
    "squared": lambda log_ratio: log_ratio**2,
}
"""Name -> an estimator of the KL divergence from the reference, of the log-ratio of model and reference at a sampled token.

Source: Schulman 2020, "Approximating KL divergence"; `squared` is twice k2.
"""


def clip_fractions(
    log_ratio_NS: jax.Array, advantage_N: jax.Array, low: float, high: float
) -> tuple[jax.Array, jax.Array]:
    """Whether the lower and the upper limit take away the gradient of each token, bool [N, S] each."""
    ratio_NS, advantage_N1 = jnp.exp(log_ratio_NS), advantage_N[:, None]
    return (ratio_NS < 1 - low) & (advantage_N1 < 0), (ratio_NS > 1 + high) & (advantage_N1 > 0)


def token_weights(mask_NS: jax.Array, average: Average) -> jax.Array:
    """How much each token counts in the sum of an average, float32 [N, S]."""
    if average != "seq_mean_token_mean":
        return mask_NS
    return mask_NS / jnp.maximum(jnp.sum(mask_NS, axis=1, keepdims=True), 1.0)


def average_weight(mask: jax.Array, average: Average, max_response_tokens: int | None) -> jax.Array:
    """The denominator of an average, a scalar. Args: mask: [..., S]."""
    if average == "token_mean":
        return jnp.sum(mask)
    num_responses = jnp.sum(jnp.any(mask > 0, axis=-1), dtype=jnp.float32)
    if average == "dr_grpo":
        assert max_response_tokens is not None, "a constant length has been given"
        return num_responses * max_response_tokens
    return num_responses
