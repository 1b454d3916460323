"""Policy gradients on sampled responses: advantages, probability ratios, clipping, KL estimators and averages.

Source: PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7) with the advantages of GRPO (Shao et al. 2024,
arXiv:2402.03300, section 4.1); the variants name their own papers.

Shapes: N responses, S positions.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import is_float32

Scale = Literal["group", "batch", "batch_advantages", "none"]
Baseline = Literal["mean", "leave_one_out"]
Level = Literal["token", "sequence"]
Importance = Literal["token", "sequence", "sequence_product"]
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Average = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"]


def group_advantages(
    rewards: jax.Array,
    *,
    scale: Scale = "group",
    baseline: Baseline = "mean",
    std_ddof: int = 0,
    eps: float = 1e-8,
    std_of_batch: jax.Array | None = None,
) -> jax.Array:
    """The advantage of each response over the others of its group, float32 [..., group].

    Source: Shao et al. 2024 (arXiv:2402.03300), section 4.1.2. Without `scale`: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783,
    section 3.2). `leave_one_out`: RLOO (Ahmadian et al. 2024, arXiv:2402.14740, equation 6).

    Args:
        rewards: [..., group].
        scale: whether advantages are divided by the group's standard deviation, or by `std_of_batch`.
        baseline: what is subtracted: the mean of the group, or that of the other responses.
        std_ddof: 0 divides the sum of squares by the number of responses, 1 by one less.
        eps: added to the standard deviation.
        std_of_batch: see `batch_std`. Scalar.
    """
    size, centered = rewards.shape[-1], _centered(rewards)
    advantages = centered * size / (size - 1) if baseline == "leave_one_out" else centered
    if scale == "none":
        return advantages
    if scale == "group":
        return advantages / (group_std(rewards, std_ddof)[..., None] + eps)
    assert std_of_batch is not None, "the scale is that of the whole batch"
    return advantages / (std_of_batch + eps)


def batch_std(
    rewards: jax.Array, is_response: jax.Array, *, scale: Scale, baseline: Baseline, std_ddof: int
) -> jax.Array:
    """The standard deviation over a whole batch of what `scale` names, a scalar.

    Source: of the rewards, `batch`: Liu et al. 2025, "Tricks or Traps? A Deep Dive into RL for LLM Reasoning"
    (arXiv:2508.08221); of the advantages, `batch_advantages`: REINFORCE++ (Hu 2025, arXiv:2501.03262).

    Args:
        rewards: [..., group].
        is_response: bool [..., group]; others are padding.
    """
    if scale == "batch_advantages":
        rewards = group_advantages(rewards, scale="none", baseline=baseline)
    count = jnp.sum(is_response, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(is_response, rewards, 0.0)) / jnp.maximum(count, 1.0)
    squares = jnp.where(is_response, (rewards - mean) ** 2, 0.0)
    return jnp.sqrt(jnp.sum(squares) / jnp.maximum(count - std_ddof, 1.0))


def group_std(rewards: jax.Array, std_ddof: int) -> jax.Array:
    """The standard deviation of each group's rewards, float32 [...]. Args: rewards: [..., group]."""
    return jnp.sqrt(jnp.sum(_centered(rewards) ** 2, axis=-1) / (rewards.shape[-1] - std_ddof))


def _centered(rewards: jax.Array) -> jax.Array:
    """Rewards without the mean of their group; exactly 0 in a group of equal rewards, whose mean may be rounded."""
    rewards = rewards.astype(jnp.float32)
    centered = rewards - jnp.mean(rewards, axis=-1, keepdims=True)
    are_equal = jnp.max(rewards, axis=-1, keepdims=True) == jnp.min(rewards, axis=-1, keepdims=True)
    return jnp.where(are_equal, 0.0, centered)


def log_ratios(logps_NS: jax.Array, others_NS: jax.Array, mask_NS: jax.Array, level: Importance) -> jax.Array:
    """How much more likely each token is than for another model, as a logarithm, float32 [N, S].

    With `sequence`, every token has the mean of its response: the ratio is that of the whole responses, normalized by length.
    Source: GSPO (Zheng et al. 2025, arXiv:2507.18071, equation 7). With `sequence_product`, it has their sum: the ratio of
    the responses themselves, which are one action in RLOO (Ahmadian et al. 2024, arXiv:2402.14740, section 3).
    """
    ratios_NS = jnp.where(mask_NS > 0, logps_NS - others_NS, 0.0)
    if level == "token":
        return ratios_NS
    of_sequence_N = jnp.sum(ratios_NS * mask_NS, axis=1)
    if level == "sequence":
        of_sequence_N /= jnp.maximum(jnp.sum(mask_NS, axis=1), 1.0)
    return jnp.broadcast_to(of_sequence_N[:, None], ratios_NS.shape)


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


def sampler_weights(
    logps_NS: jax.Array, sampler_NS: jax.Array, mask_NS: jax.Array, mode: Correction, floor: float, cap: float
) -> jax.Array:
    """How much more likely each token, or the whole response, is than for the sampler, without a gradient, float32 [N, S].

    Source: truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"), for a sampler that draws from another distribution than the trainer's; of responses, and masked: Liu et al.
    2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".

    Args:
        mode: whether the weight is that of the token or of the `sequence`, and whether one that is below `floor` or above
            `cap` becomes this limit (`truncate`), or 0 (`mask`).
    """
    level: Importance = "token" if mode.startswith("token") else "sequence_product"
    ratio_NS = jnp.exp(log_ratios(logps_NS, sampler_NS, mask_NS, level))
    if mode.endswith("truncate"):
        weight_NS = jnp.clip(ratio_NS, floor, cap)
    else:
        weight_NS = jnp.where((ratio_NS >= floor) & (ratio_NS <= cap), ratio_NS, 0.0)
    return jax.lax.stop_gradient(weight_NS)


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


_SMALLEST_LOG_WEIGHT, _LARGEST_LOG_WEIGHT = -18.420681, 20.0  # ln 1e-8; as in the authors' code


def vespo_losses(
    log_ratio_NS: jax.Array,
    logps_NS: jax.Array,
    advantage_N: jax.Array,
    mask_NS: jax.Array,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> jax.Array:
    """VESPO's loss of each token, float32 [N, S]: a smooth weight of the ratio w of the whole response, w^k e^(l - l w),
    which is 1 at 1 and has no gradient.

    Source: "VESPO: Variational Sequence-Level Soft Policy Optimization" (2026, arXiv:2602.10693).

    Args:
        log_ratio_NS: of each token.
        positive, negative: k and l for positive (or no) and for negative advantages.
    """
    bounded_NS = jnp.clip(log_ratio_NS, -_LARGEST_LOG_WEIGHT, _LARGEST_LOG_WEIGHT)
    log_w_N = jnp.clip(jnp.sum(bounded_NS * mask_NS, axis=1), _SMALLEST_LOG_WEIGHT, _LARGEST_LOG_WEIGHT)
    k_N, l_N = (jnp.where(advantage_N >= 0, *both) for both in zip(positive, negative, strict=True))
    weight_N = jnp.exp(l_N + k_N * log_w_N - l_N * jnp.exp(log_w_N))
    return -jax.lax.stop_gradient(weight_N * advantage_N)[:, None] * logps_NS


def check_vespo_weights(sign: str, power: float, decay: float) -> None:
    """Raises `ConfigError` if the largest weight of a response is far from 1. Args: sign: of the advantages, in keys."""
    if not all(number > 0 and is_float32(number) for number in (power, decay)):
        return  # their types refuse that
    log_w = min(max(math.log(power) - math.log(decay), _SMALLEST_LOG_WEIGHT), _LARGEST_LOG_WEIGHT)
    largest = decay + power * log_w - decay * math.exp(log_w)
    if largest > _LARGEST_LOG_WEIGHT:
        raise ConfigError(
            f"objective.vespo_{sign}_decay: {decay:g} given with vespo_{sign}_power: {power:g}, with which the weight of a"
            f" response reaches e^{largest:.3g}, at most e^{_LARGEST_LOG_WEIGHT:g} expected. Set both to numbers such as 2"
            " and 3"
        )


def gmpo_losses(
    log_ratio_NS: jax.Array, advantage_N: jax.Array, mask_NS: jax.Array, low: float, high: float
) -> jax.Array:
    """GMPO's loss, the same for each token of a response, float32 [N, S]: of the geometric mean of the tokens' ratios, whose
    logarithms are clipped as PPO clips the ratios, to -low and high.

    Source: Zhao et al. 2025, "Geometric-Mean Policy Optimization" (arXiv:2507.20673).

    Args:
        log_ratio_NS: of each token.
    """
    advantage_N1 = advantage_N[:, None]
    clipped_NS = jnp.clip(log_ratio_NS, -low, high)
    pessimistic_NS = jnp.where(
        advantage_N1 > 0, jnp.minimum(log_ratio_NS, clipped_NS), jnp.maximum(log_ratio_NS, clipped_NS)
    )
    mean_N = jnp.sum(pessimistic_NS * mask_NS, axis=1) / jnp.maximum(jnp.sum(mask_NS, axis=1), 1.0)
    return jnp.broadcast_to(-(jnp.exp(mean_N) * advantage_N)[:, None], log_ratio_NS.shape)


def on_policy_weights(
    logps_NS: jax.Array, old_NS: jax.Array, advantage_N: jax.Array, mask_NS: jax.Array, threshold: float
) -> jax.Array:
    """0 for responses with a negative advantage that have become less likely by more than `threshold` nats a token, else 1,
    float32 [N, 1].

    Source: off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, equation 9).
    """
    fallen_NS = jnp.where(mask_NS > 0, old_NS - jax.lax.stop_gradient(logps_NS), 0.0)
    mean_N = jnp.sum(fallen_NS * mask_NS, axis=1) / jnp.maximum(jnp.sum(mask_NS, axis=1), 1.0)
    return ((advantage_N >= 0) | (mean_N <= threshold)).astype(jnp.float32)[:, None]


def most_uncertain(entropy_NS: jax.Array, mask_NS: jax.Array, share: float) -> jax.Array:
    """Whether each token is one of this `share` of all tokens that had the largest entropies, bool [N, S].

    Source: Wang et al. 2025, "Beyond the 80/20 Rule" (arXiv:2506.01939), equation 5.
    """
    is_token_NS = mask_NS > 0
    threshold = jnp.nanquantile(jnp.where(is_token_NS, entropy_NS, jnp.nan), 1 - share)
    return is_token_NS & (entropy_NS >= threshold)


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
    log_ratio_NS: jax.Array, advantage_N: jax.Array, low: float, high: float, *, of_logarithms: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Whether the lower and the upper limit take away the gradient of each token, bool [N, S] each.

    Args:
        of_logarithms: the limits are those of the logarithms of the ratios, from 0, and not of the ratios, from 1.
    """
    center, advantage_N1 = 0.0 if of_logarithms else 1.0, advantage_N[:, None]
    ratio_NS = log_ratio_NS if of_logarithms else jnp.exp(log_ratio_NS)
    return (ratio_NS < center - low) & (advantage_N1 < 0), (ratio_NS > center + high) & (advantage_N1 > 0)


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
