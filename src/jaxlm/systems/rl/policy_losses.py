"""Policy gradients on sampled responses: ratios, losses and clipping, against the policies that GRPO compares with.

Those are the policy that sampled the responses, and the reference.

Source: PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7); the variants name their own papers.

Shapes: N responses, S positions.
"""

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import draccus
import jax
import jax.numpy as jnp

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import AboveOne, BelowOne, NonNegativeFloat, PositiveFloat, PositiveInt, is_float32
from jaxlm.core.rules import Rules, ordered
from jaxlm.core.values.sums import Sum
from jaxlm.objectives.base import Metrics
from jaxlm.reading.choices import Registry, choice
from jaxlm.systems.rl.advantages import ResponseTokens

Importance = Literal["token", "sequence", "sequence_product"]


def log_ratios(logps_NS: jax.Array, others_NS: jax.Array, mask_NS: jax.Array, level: Importance) -> jax.Array:
    """Computes how much more likely each token is than for another model, as a logarithm, float32 [N, S].

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


@dataclass(frozen=True)
class PolicyLoss(Registry, draccus.ChoiceRegistry, abc.ABC, by_name=True):
    """Defines what is minimized at each token, from the ratio of its probability to that under the old policy."""

    importance: ClassVar[Importance] = "token"
    is_of_responses: ClassVar[bool] = False
    """Whether each token has the loss of its whole response, which leaves out the tokens that do not count by itself."""
    corrects_ratio: ClassVar[bool] = False
    """Whether importance sampling corrects the ratio, and not the loss."""

    @abc.abstractmethod
    def losses(self, tokens: ResponseTokens, log_ratio_NS: jax.Array, advantage_N: jax.Array) -> jax.Array:
        """The loss of each token, float32 [N, S]. Args: log_ratio_NS: see `log_ratios`."""


@dataclass(frozen=True)
class RatioLoss(PolicyLoss, abc.ABC):
    """A loss of a ratio at any level.

    Attributes:
        importance: the ratio is that of each `token`; of the whole `sequence`, normalized by its length (GSPO); or of the
            whole sequence as it is, `sequence_product` (RLOO).
    """

    importance: Importance = "token"  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(frozen=True)
class ClippedLoss(PolicyLoss, abc.ABC):
    """A loss of clipped ratios.

    Attributes:
        epsilon: the ratio is clipped below 1 minus this, and above 1 plus this. With `gmpo`, the logarithm of the ratio stays
            within this distance of 0; the paper has 0.4.
        epsilon_high: the upper limit, if it differs; null is `epsilon`. DAPO has 0.28.
    """

    clips_logarithms: ClassVar[bool] = False

    epsilon: BelowOne = 0.2
    epsilon_high: NonNegativeFloat | None = None

    @property
    def limits(self) -> tuple[float, float]:
        """The distances below and above its center at which the ratio is clipped."""
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high

    def is_clipped(self, log_ratio_NS: jax.Array, advantage_N: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tells whether the lower and the upper limit take away the gradient of each token, bool [N, S] each."""
        center, advantage_N1 = 0.0 if self.clips_logarithms else 1.0, advantage_N[:, None]
        ratio_NS, (low, high) = log_ratio_NS if self.clips_logarithms else jnp.exp(log_ratio_NS), self.limits
        return (ratio_NS < center - low) & (advantage_N1 < 0), (ratio_NS > center + high) & (advantage_N1 > 0)


@choice(PolicyLoss, "clip")
class Clip(RatioLoss, ClippedLoss):
    """PPO's clipped ratio. A larger upper limit: DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.1).

    Attributes:
        dual_clip: the largest loss of a token with a negative advantage, in units of the advantage (Ye et al. 2020,
            arXiv:1912.09729, equation 6); null has no limit.
    """

    dual_clip: AboveOne | None = None

    def losses(self, tokens: ResponseTokens, log_ratio_NS: jax.Array, advantage_N: jax.Array) -> jax.Array:
        (low, high), ratio_NS, advantage_N1 = self.limits, jnp.exp(log_ratio_NS), advantage_N[:, None]
        clipped_NS = jnp.clip(ratio_NS, 1 - low, 1 + high)
        losses_NS = jnp.maximum(-ratio_NS * advantage_N1, -clipped_NS * advantage_N1)
        if self.dual_clip is None:
            return losses_NS
        return jnp.where(advantage_N1 < 0, jnp.minimum(losses_NS, -self.dual_clip * advantage_N1), losses_NS)


@choice(PolicyLoss, "gmpo")
class Gmpo(ClippedLoss):
    """Of the geometric mean of the tokens' ratios, whose logarithms are clipped as PPO clips the ratios.

    Source: Zhao et al. 2025, "Geometric-Mean Policy Optimization" (arXiv:2507.20673).
    """

    importance: ClassVar[Importance] = "token"
    is_of_responses: ClassVar[bool] = True
    clips_logarithms: ClassVar[bool] = True

    def losses(self, tokens: ResponseTokens, log_ratio_NS: jax.Array, advantage_N: jax.Array) -> jax.Array:
        (low, high), advantage_N1 = self.limits, advantage_N[:, None]
        clipped_NS = jnp.clip(log_ratio_NS, -low, high)
        pessimistic_NS = jnp.where(
            advantage_N1 > 0, jnp.minimum(log_ratio_NS, clipped_NS), jnp.maximum(log_ratio_NS, clipped_NS)
        )
        ratio_N = jnp.exp(_mean_N(pessimistic_NS, tokens.counted))
        return jnp.broadcast_to(-(ratio_N * advantage_N)[:, None], log_ratio_NS.shape)


@choice(PolicyLoss, "cispo")
class Cispo(RatioLoss):
    """The ratio is a weight without a gradient.

    Source: CISPO (MiniMax-M1, Chen et al. 2025, arXiv:2506.13585, equation 4).

    Attributes:
        cap: the largest weight of a token.
    """

    cap: PositiveFloat = 5.0

    def losses(self, tokens: ResponseTokens, log_ratio_NS: jax.Array, advantage_N: jax.Array) -> jax.Array:
        weight_NS = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio_NS), self.cap))
        return -weight_NS * advantage_N[:, None] * tokens.logps


_SATURATED = 80.0


@choice(PolicyLoss, "sapo")
class Sapo(RatioLoss):
    """A sigmoid of the ratio, of slope 1 at 1, which saturates instead of clipping.

    Source: Gao et al. 2025, "Soft Adaptive Policy Optimization" (arXiv:2511.20347).

    Attributes:
        positive_temperature, negative_temperature: how fast it saturates as the ratio moves away from 1, for positive and for
            negative advantages.
    """

    positive_temperature: PositiveFloat = 1.0
    negative_temperature: PositiveFloat = 1.05

    def losses(self, tokens: ResponseTokens, log_ratio_NS: jax.Array, advantage_N: jax.Array) -> jax.Array:
        advantage_N1 = advantage_N[:, None]
        temperature_N1 = jnp.where(advantage_N1 > 0, self.positive_temperature, self.negative_temperature)
        log_ratio_NS = jnp.minimum(log_ratio_NS, _SATURATED)  # infinity times the slope of 0 would be NaN
        gate_NS = jax.nn.sigmoid(temperature_N1 * jnp.expm1(log_ratio_NS)) * 4 / temperature_N1
        return -gate_NS * advantage_N1


SMALLEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT = -18.420681, 20.0
"""Of a response, for `vespo`: ln 1e-8, and the largest; as in the authors' code."""


@choice(PolicyLoss, "vespo")
class Vespo(PolicyLoss):
    """A smooth weight of the ratio w of the whole response, w^k e^(l - l w), which is 1 at 1 and has no gradient.

    Source: "VESPO: Variational Sequence-Level Soft Policy Optimization" (2026, arXiv:2602.10693).

    Attributes:
        positive_power, negative_power: k, how fast the weight falls for responses that have become less likely, for positive
            (or no) and for negative advantages.
        positive_decay, negative_decay: l, how fast it falls for those that have become more likely. At the ratio of power and
            decay, the weight is largest; no response may count more than e^20 times as much as without a weight.
    """

    corrects_ratio: ClassVar[bool] = True

    positive_power: PositiveFloat = 2.0
    positive_decay: PositiveFloat = 3.0
    negative_power: PositiveFloat = 3.0
    negative_decay: PositiveFloat = 2.0

    def __post_init__(self):
        self._check("positive", self.positive_power, self.positive_decay)
        self._check("negative", self.negative_power, self.negative_decay)

    def _check(self, sign: str, power: float, decay: float) -> None:
        """Raises `ConfigError` if the largest weight of a response is far from 1."""
        if not all(number > 0 and is_float32(number) for number in (power, decay)):
            return  # their types refuse that
        log_w = min(max(math.log(power) - math.log(decay), SMALLEST_LOG_WEIGHT), LARGEST_LOG_WEIGHT)
        largest = decay + power * log_w - decay * math.exp(log_w)
        if largest > LARGEST_LOG_WEIGHT:
            raise ConfigError(
                f"objective.loss.{sign}_decay: {decay:g} given with {sign}_power: {power:g}, with which the weight of a"
                f" response reaches e^{largest:.3g}, at most e^{LARGEST_LOG_WEIGHT:g} expected. Set both to numbers such"
                " as 2 and 3"
            )

    def losses(self, tokens: ResponseTokens, log_ratio_NS: jax.Array, advantage_N: jax.Array) -> jax.Array:
        bounded_NS = jnp.clip(log_ratio_NS, -LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
        log_w_N = jnp.clip(jnp.sum(bounded_NS * tokens.mask, axis=1), SMALLEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
        k_N = jnp.where(advantage_N >= 0, self.positive_power, self.negative_power)
        l_N = jnp.where(advantage_N >= 0, self.positive_decay, self.negative_decay)
        weight_N = jnp.exp(l_N + k_N * log_w_N - l_N * jnp.exp(log_w_N))
        return -jax.lax.stop_gradient(weight_N * advantage_N)[:, None] * tokens.logps


def clip_metrics(loss: PolicyLoss, tokens: ResponseTokens, log_ratio_NS: jax.Array, advantage_N: jax.Array) -> Metrics:
    """The fractions of tokens that the limits of a loss clip."""
    if not isinstance(loss, ClippedLoss):
        return {}
    # Ratios of whole responses count once each.
    weight_NS = tokens.mask if loss.importance == "token" else _shares(tokens.mask)
    low_NS, high_NS = loss.is_clipped(log_ratio_NS, advantage_N)
    sides = {"clip_ratio/low_mean": low_NS, "clip_ratio/high_mean": high_NS}
    return {name: Sum(jnp.sum(clipped_NS * weight_NS), jnp.sum(weight_NS)) for name, clipped_NS in sides.items()}


def on_policy_weights(tokens: ResponseTokens, advantage_N: jax.Array, threshold: float) -> jax.Array:
    """0 for responses with a negative advantage that have become less likely by more than `threshold` nats a token, else 1,
    float32 [N, 1].

    Source: off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, equation 9).
    """
    fallen_NS = jnp.where(tokens.mask > 0, tokens.sampled - jax.lax.stop_gradient(tokens.logps), 0.0)
    return ((advantage_N >= 0) | (_mean_N(fallen_NS, tokens.mask) <= threshold)).astype(jnp.float32)[:, None]


def most_uncertain(entropy_NS: jax.Array, mask_NS: jax.Array, share: float) -> jax.Array:
    """Marks each token that is one of this `share` of all tokens that had the largest entropies, bool [N, S].

    Source: Wang et al. 2025, "Beyond the 80/20 Rule" (arXiv:2506.01939), equation 5.
    """
    is_token_NS = mask_NS > 0
    threshold = jnp.nanquantile(jnp.where(is_token_NS, entropy_NS, jnp.nan), 1 - share)
    return is_token_NS & (entropy_NS >= threshold)


@dataclass(frozen=True)
class LossAgg(Registry, draccus.ChoiceRegistry, by_name=True):
    """Defines what the losses of tokens are averaged over."""

    def token_weights(self, mask_NS: jax.Array) -> jax.Array:
        """Returns how much each token counts in the sum, float32 [N, S]."""
        return _shares(mask_NS) if isinstance(self, SeqMeanTokenMean) else mask_NS

    def denominator(self, mask: jax.Array, counted: jax.Array) -> jax.Array:
        """Returns what the sum is divided by, a scalar.

        Args:
            mask: [..., S].
            counted: the same, without responses that are left out; where responses are counted, they still are.
        """
        if isinstance(self, TokenMean):
            return jnp.sum(counted)
        num_responses = jnp.sum(jnp.any(mask > 0, axis=-1), dtype=jnp.float32)
        return num_responses * self.max_response_tokens if isinstance(self, DrGrpo) else num_responses


@choice(LossAgg, "token_mean")
class TokenMean(LossAgg):
    """Over all tokens (DAPO)."""


@choice(LossAgg, "seq_mean_token_mean")
class SeqMeanTokenMean(LossAgg):
    """Over responses of the mean of their tokens (GRPO)."""


@choice(LossAgg, "seq_mean_token_sum")
class SeqMeanTokenSum(LossAgg):
    """Over responses of the sum of their tokens."""


@choice(LossAgg, "dr_grpo")
class DrGrpo(LossAgg):
    """Over responses of the sum of their tokens divided by a constant.

    Attributes:
        max_response_tokens: the constant: the limit with which the responses were sampled.
    """

    max_response_tokens: PositiveInt


def _mean_N(of_tokens_NS: jax.Array, mask_NS: jax.Array) -> jax.Array:
    return jnp.sum(of_tokens_NS * mask_NS, axis=1) / jnp.maximum(jnp.sum(mask_NS, axis=1), 1.0)


def _shares(mask_NS: jax.Array) -> jax.Array:
    """The share of each token in its response."""
    return mask_NS / jnp.maximum(jnp.sum(mask_NS, axis=1, keepdims=True), 1.0)


@dataclass(frozen=True)
class ImportanceSampling:
    """Weights each token by the ratio of its probability to that which the sampler has recorded.

    Source: truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"), for a sampler that draws from another distribution than the trainer's; of responses, and masked: Liu et al.
    2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".

    Attributes:
        cap: the largest weight.
        floor: the smallest weight.
        mode: weight by the ratio of each token, or of the whole response (`sequence_...`); a ratio that is not between
            `floor` and `cap` becomes the limit (`..._truncate`), or 0 (`..._mask`).
    """

    cap: PositiveFloat
    floor: NonNegativeFloat = 0.0
    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"

    key_rules: ClassVar[Rules] = (ordered("floor", "cap"),)

    @property
    def is_of_tokens(self) -> bool:
        return self.mode.startswith("token")

    def weights(self, logps_NS: jax.Array, sampler_NS: jax.Array, mask_NS: jax.Array) -> jax.Array:
        """The weight of each token, without a gradient, float32 [N, S]."""
        level = "token" if self.is_of_tokens else "sequence_product"
        ratio_NS = jnp.exp(log_ratios(logps_NS, sampler_NS, mask_NS, level))
        if self.mode.endswith("truncate"):
            weight_NS = jnp.clip(ratio_NS, self.floor, self.cap)
        else:
            weight_NS = jnp.where((ratio_NS >= self.floor) & (ratio_NS <= self.cap), ratio_NS, 0.0)
        return jax.lax.stop_gradient(weight_NS)


@dataclass(frozen=True)
class OldPolicy(Registry, draccus.ChoiceRegistry, by_name=True):
    """The model whose probabilities the ratios compare with."""


@choice(OldPolicy, "reference")
class OfReference(OldPolicy):
    """The reference has sampled the responses, which are stored."""


@choice(OldPolicy, "rollout")
class OfRollout(OldPolicy):
    """The sampler has recorded its probabilities (`data.type: rollouts`)."""


@choice(OldPolicy, "model")
class OfModel(OldPolicy):
    """The model that trains, so that all ratios are 1.

    Attributes:
        importance_sampling: with `data.type: rollouts`, correct for the probabilities that the sampler has recorded
            (truncated importance sampling); null does not.
    """

    importance_sampling: ImportanceSampling | None = None


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


@dataclass(frozen=True)
class Kl(Registry, draccus.ChoiceRegistry, by_name=True):
    """The KL divergence from the reference.

    Attributes:
        coef: its weight.
        estimator: `k1`, `k2`, `k3` or `squared` (twice k2).
    """

    coef: PositiveFloat = 0.01
    estimator: Literal["k1", "k2", "k3", "squared"] = "k3"


@choice(Kl, "loss")
class KlInLoss(Kl):
    """Added to the loss.

    Attributes:
        level: the estimator reads the log-ratio of each `token`, or their mean over the `sequence`.
        unbiased: multiply the estimate by the ratio, so that its gradient is that of the KL divergence (DeepSeek-V3.2).
    """

    level: Literal["token", "sequence"] = "token"
    unbiased: bool = False

    def estimate(self, tokens: ResponseTokens, log_ratio_NS: jax.Array) -> jax.Array:
        """The divergence of the model at each token, float32 [N, S]. Args: log_ratio_NS: to the old policy."""
        assert tokens.reference is not None, "a reference has annotated the batch"
        of_reference_NS = log_ratios(tokens.logps, tokens.reference, tokens.mask, self.level)
        kl_NS = KL_ESTIMATORS[self.estimator](of_reference_NS)
        return kl_NS * jnp.exp(log_ratio_NS) if self.unbiased else kl_NS


@choice(Kl, "reward")
class KlInReward(Kl):
    """Subtracted from the rewards, summed over the response, as that of the model that sampled it."""

    def estimate(self, tokens: ResponseTokens, mask_NS: jax.Array) -> jax.Array:
        """The divergence of the model that sampled each token, float32 [N, S]."""
        assert tokens.reference is not None, "a reference has annotated the batch"
        ratio_NS = log_ratios(tokens.sampled, tokens.reference, mask_NS, "token")
        return KL_ESTIMATORS[self.estimator](ratio_NS) * mask_NS
