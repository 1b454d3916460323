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


def _smoothed(logit: jax.Array, options: PairLossOptions) -> jax.Array:
    """The logistic loss, if a fraction `label_smoothing` of the preferences is reversed."""
    epsilon = options.label_smoothing
    return (1 - epsilon) * jax.nn.softplus(-logit) + epsilon * jax.nn.softplus(logit)


def sigmoid(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """DPO: Rafailov et al. 2023 (arXiv:2305.18290), equation 7. With label smoothing, conservative DPO: Mitchell 2023, "A
    note on DPO with noisy preferences & relationship to IPO", equation 3.
    """
    return _smoothed(options.beta * pair.margin, options)


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
    return _smoothed(options.beta * margin - options.simpo_gamma, options)


def alphapo(pair: PairLogps, options: PairLossOptions) -> jax.Array:
    """AlphaPO: Gupta et al. 2025 (arXiv:2501.03884), SimPO with the reward (1 - p^-alpha) / alpha of a likelihood p per token
    instead of its logarithm. It needs no reference.
    """
    alpha = options.alphapo_alpha
    chosen, rejected = (-jnp.expm1(-alpha * mean) / alpha for mean in (pair.chosen_per_token, pair.rejected_per_token))
    return _smoothed(options.beta * (chosen - rejected) - options.simpo_gamma, options)


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


def aot(pair: PairLogps, options: PairLossOptions, is_pair: jax.Array) -> jax.Array:
    """AOT on pairs: Melnyk et al. 2024 (arXiv:2406.05882): the distribution of the model's log-ratios of chosen and rejected
    completions dominates that of the reference's: the n-th smallest of one is compared with the n-th smallest of the other.
    """
    ours, theirs = pair.chosen - pair.rejected, pair.reference_chosen - pair.reference_rejected
    return _smoothed(options.beta * (ours - _of_equal_rank(ours, theirs, is_pair)), options)


def aot_unpaired(pair: PairLogps, options: PairLossOptions, is_pair: jax.Array) -> jax.Array:
    """AOT without pairs: Melnyk et al. 2024 (arXiv:2406.05882): the distribution of the chosen completions' log-ratios to the
    reference dominates that of the rejected.
    """
    chosen, rejected = pair.chosen_ratio, pair.rejected_ratio
    return _smoothed(options.beta * (chosen - _of_equal_rank(chosen, rejected, is_pair)), options)


def _of_equal_rank(ours: jax.Array, others: jax.Array, is_pair: jax.Array) -> jax.Array:
    """For each of ours, the one of the others that has its rank among them. Rows that are no pairs come last."""
    first = [jax.lax.stop_gradient(jnp.where(is_pair, column, jnp.inf)) for column in (ours, others)]
    rank = jnp.argsort(jnp.argsort(first[0]))
    return others[jnp.argsort(first[1])][rank]


_MOST_NATS = 80.0  # exp of more would be infinite in float32


def _alpha_score(log_ratio: jax.Array, alpha: float) -> jax.Array:
    return jnp.expm1(jnp.minimum((alpha - 1) * log_ratio, _MOST_NATS)) / (alpha - 1)


DIVERGENCES: Mapping[str, Callable[[jax.Array, float], jax.Array]] = {
    "reverse_kl": lambda log_ratio, alpha: log_ratio,
    "forward_kl": lambda log_ratio, alpha: _alpha_score(log_ratio, 0.0),
    "js_divergence": lambda log_ratio, alpha: jnp.log(2.0) + jax.nn.log_sigmoid(log_ratio),
    "alpha_divergence": _alpha_score,
}
"""Name of a divergence from the reference -> (log-ratio to it, alpha) -> the score whose difference is the margin: the
derivative of its f at the ratio.

Source: f-DPO (Wang et al. 2023, arXiv:2309.16240), table 1.
"""


def scored(pair: PairLogps, divergence: str, alpha: float, lengths: tuple[jax.Array, jax.Array] | None) -> PairLogps:
    """Pairs with scores instead of log-likelihoods, and without a reference, so that their margin is that of a divergence.

    Args:
        divergence: see `DIVERGENCES`.
        lengths: what the scores of chosen and of rejected completions are divided by; None for nothing.
    """
    chosen, rejected = (DIVERGENCES[divergence](ratio, alpha) for ratio in (pair.chosen_ratio, pair.rejected_ratio))
    if lengths is not None:
        chosen, rejected = chosen / lengths[0], rejected / lengths[1]
    nothing = jnp.zeros_like(chosen)
    return pair._replace(chosen=chosen, rejected=rejected, reference_chosen=nothing, reference_rejected=nothing)


PairLoss = Callable[[PairLogps, PairLossOptions], jax.Array]
BatchLoss = Callable[[PairLogps, PairLossOptions, jax.Array], jax.Array]
OF_MARGIN: Mapping[str, PairLoss] = {loss.__name__: loss for loss in (sigmoid, robust, ipo, hinge, exo_pair, discopop)}
"""The losses that read nothing but the margin."""
WITH_REFERENCE: Mapping[str, PairLoss] = {
    loss.__name__: loss
    for loss in (sigmoid, robust, ipo, hinge, apo_zero, apo_down, exo_pair, nca_pair, bco_pair, sppo_hard, discopop)
}
WITHOUT_REFERENCE: Mapping[str, PairLoss] = {loss.__name__: loss for loss in (simpo, alphapo, orpo)}
PAIR_LOSSES: Mapping[str, PairLoss] = {**WITH_REFERENCE, **WITHOUT_REFERENCE}
"""Name -> (log-likelihoods, options) -> the loss of each pair, float32 [pairs]."""
BATCH_LOSSES: Mapping[str, BatchLoss] = {loss.__name__: loss for loss in (aot, aot_unpaired)}
"""Name -> (log-likelihoods, options, bool [pairs]: whether a row is a pair) -> the loss of each pair, float32 [pairs]. They
compare the pairs of a batch with each other, and with a reference.
"""
