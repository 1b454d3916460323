"""Losses of preference pairs, from the log-likelihoods of their completions.

Source: each loss names its paper and equation. The names are those of TRL's `loss_type`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

# ln(1 - exp(x)) for x closer to 0 than this would be infinite in float32.
_CLOSEST = -1e-7


class PairLogps(NamedTuple):
    """Log-likelihoods of pairs of completions, float32 [pairs] each.

    Attributes:
        chosen, rejected: of the model that trains.
        reference_chosen, reference_rejected: of the reference; 0 without one.
        chosen_per_token, rejected_per_token: of the model that trains, divided by the number of tokens.
    """

    chosen: jax.Array
    rejected: jax.Array
    reference_chosen: jax.Array
    reference_rejected: jax.Array
    chosen_per_token: jax.Array
    rejected_per_token: jax.Array

    @property
    def chosen_ratio(self) -> jax.Array:
        """Log of how much more likely the chosen completion is than for the reference."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> jax.Array:
        """Log of how much more likely the rejected completion is than for the reference."""
        return self.rejected - self.reference_rejected

    @property
    def margin(self) -> jax.Array:
        """By how much the log-ratio of the chosen completion exceeds that of the rejected."""
        return self.chosen_ratio - self.rejected_ratio


@dataclass(frozen=True)
class PairLossOptions:
    """Numbers of the losses, as in the objective `dpo`."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    alphapo_alpha: float = 0.25
    discopop_tau: float = 0.05


def sigmoid(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """DPO: Rafailov et al. 2023 (arXiv:2305.18290), equation 7. With label smoothing, conservative DPO: Mitchell 2023, "A
    note on DPO with noisy preferences & relationship to IPO", equation 3.
    """
    logit, epsilon = options.beta * pair.margin, options.label_smoothing
    return (1 - epsilon) * jax.nn.softplus(-logit) + epsilon * jax.nn.softplus(logit)


def robust(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """Robust DPO: Chowdhury et al. 2024 (arXiv:2403.00409), eq. 12. Unbiased if a fraction `label_smoothing` is swapped."""
    logit, epsilon = options.beta * pair.margin, options.label_smoothing
    smoothed = (1 - epsilon) * jax.nn.softplus(-logit) - epsilon * jax.nn.softplus(logit)
    return smoothed / (1 - 2 * epsilon)


def ipo(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """IPO: Azar et al. 2023 (arXiv:2310.12036), equation 17, with beta for its tau."""
    return (pair.margin - 1 / (2 * options.beta)) ** 2


def hinge(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """SLiC: Zhao et al. 2023 (arXiv:2305.10425), equation 1, on the log-ratios of Liu et al. 2023 (arXiv:2309.06657)."""
    return jax.nn.relu(1 - options.beta * pair.margin)


def apo_zero(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """APO-zero: D'Oosterlinck et al. 2024 (arXiv:2408.06266), equation 7: raises the chosen, lowers the rejected."""
    chosen, rejected = (jax.nn.sigmoid(options.beta * ratio) for ratio in (pair.chosen_ratio, pair.rejected_ratio))
    return 1 - chosen + rejected


def apo_down(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """APO-down: D'Oosterlinck et al. 2024 (arXiv:2408.06266), equation 8: lowers both, the rejected more."""
    chosen, margin = (jax.nn.sigmoid(options.beta * ratio) for ratio in (pair.chosen_ratio, pair.margin))
    return chosen + 1 - margin


def exo_pair(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """EXO for two completions: Ji et al. 2024 (arXiv:2402.00856), equation 16: the KL divergence of the model's preference
    from 1 - `label_smoothing` for the chosen completion.
    """
    logit, epsilon = options.beta * pair.margin, options.label_smoothing
    wins, loses = jax.nn.log_sigmoid(logit), jax.nn.log_sigmoid(-logit)
    return jnp.exp(wins) * (wins - jnp.log1p(-epsilon)) + jnp.exp(loses) * (loses - jnp.log(epsilon))


def nca_pair(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """NCA for two completions, of which only the chosen has a reward: Chen et al. 2024 (arXiv:2402.05369), the loss NCA with
    K = 2: it keeps the likelihood of the chosen completion from falling.
    """
    chosen, rejected = options.beta * pair.chosen_ratio, options.beta * pair.rejected_ratio
    return jax.nn.softplus(-chosen) + (jax.nn.softplus(chosen) + jax.nn.softplus(rejected)) / 2


def bco_pair(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """BCO on pairs: Jung et al. 2024 (arXiv:2404.04656): classifies both completions by their rewards, without its shift."""
    return jax.nn.softplus(-options.beta * pair.chosen_ratio) + jax.nn.softplus(options.beta * pair.rejected_ratio)


def sppo_hard(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """SPPO: Wu et al. 2024 (arXiv:2405.00675), equation 4.7, if the chosen completion always wins; beta is 1 / eta."""
    target = 1 / (2 * options.beta)
    return (pair.chosen_ratio - target) ** 2 + (pair.rejected_ratio + target) ** 2


def discopop(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """DiscoPOP: Lu et al. 2024 (arXiv:2406.08414), equation 5: the margin blends a logistic and an exponential loss."""
    logit = options.beta * pair.margin
    modulation = logit / options.discopop_tau
    # One exponent: the exponential loss alone would be infinite where its share is 0.
    exponential = jnp.exp(jax.nn.log_sigmoid(modulation) - logit)
    return jax.nn.sigmoid(-modulation) * jax.nn.softplus(-logit) + exponential


def simpo(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """SimPO: Meng et al. 2024 (arXiv:2405.14734), equation 6. It needs no reference."""
    margin = pair.chosen_per_token - pair.rejected_per_token
    return jax.nn.softplus(options.simpo_gamma - options.beta * margin)


def alphapo(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """AlphaPO: Gupta et al. 2025 (arXiv:2501.03884), SimPO with the reward (1 - p^-alpha) / alpha of a likelihood p per token
    instead of its logarithm. It needs no reference.
    """
    alpha = options.alphapo_alpha
    chosen, rejected = (-jnp.expm1(-alpha * mean) / alpha for mean in (pair.chosen_per_token, pair.rejected_per_token))
    return jax.nn.softplus(options.simpo_gamma - options.beta * (chosen - rejected))


def orpo(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """The odds ratio of ORPO: Hong et al. 2024 (arXiv:2403.07691), equation 7, times its lambda. It needs no reference."""
    log_odds = [mean - _log_complement(mean) for mean in (pair.chosen_per_token, pair.rejected_per_token)]
    return options.beta * jax.nn.softplus(log_odds[1] - log_odds[0])


def _log_complement(logp: jax.Array) -> jax.Array:
    """ln(1 - exp(logp)), with the digits that float32 has on both sides of 1/2."""
    logp = jnp.minimum(logp, _CLOSEST)
    half = -jnp.log(2.0)
    near, far = jnp.where(logp > half, logp, half), jnp.where(logp > half, half, logp)
    return jnp.where(logp > half, jnp.log(-jnp.expm1(near)), jnp.log1p(-jnp.exp(far)))


PairLoss = Callable[[PairLogps, PairLossOptions], jax.Array]
WITH_REFERENCE: Mapping[str, PairLoss] = {
    loss.__name__: loss
    for loss in (sigmoid, robust, ipo, hinge, apo_zero, apo_down, exo_pair, nca_pair, bco_pair, sppo_hard, discopop)
}
WITHOUT_REFERENCE: Mapping[str, PairLoss] = {loss.__name__: loss for loss in (simpo, alphapo, orpo)}
PAIR_LOSSES: Mapping[str, PairLoss] = {**WITH_REFERENCE, **WITHOUT_REFERENCE}
"""Name -> (log-likelihoods, options) -> the loss of each pair, float32 [pairs]."""
