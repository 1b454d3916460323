"""The policies that GRPO compares the one that trains with: the one that sampled the responses, and the reference.

Shapes: N responses, S positions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeFloat, PositiveFloat
from jaxlm.objectives.policy_losses import log_ratios
from jaxlm.objectives.response_tokens import ResponseTokens
from jaxlm.reading.choices import NamedChoice, choice


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

    def __post_init__(self):
        if self.floor > self.cap:
            raise ConfigError(
                f"objective.old_policy.importance_sampling.floor: {self.floor:g} given, at most cap ({self.cap:g})"
                " expected. Lower it"
            )

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
class OldPolicy(NamedChoice):
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
class Kl(NamedChoice):
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
