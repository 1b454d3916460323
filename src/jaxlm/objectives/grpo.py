"""Group relative policy optimization, on groups of responses: stored ones, or those that the model samples as it trains.

Source: Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), equation 3; advantages, clipping, KL estimators and averages of
the variants are in `jaxlm.objectives.policy_losses`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from annotated_types import Interval
from haliax import NamedArray

from jaxlm.core.axes import BATCH, GROUP, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import LARGEST_FLOAT, BelowOne, NonNegativeFloat, PositiveFloat, PositiveInt
from jaxlm.core.types import GroupBatch, Largest, Sum
from jaxlm.models.base import LanguageModel
from jaxlm.objectives.base import AUXILIARY, Metrics, ObjectiveConfig, auxiliary_terms, auxiliary_weight
from jaxlm.objectives.completions import ReferencedObjective, token_logps, token_logps_and_entropies
from jaxlm.objectives.policy_losses import (
    KL_ESTIMATORS,
    Average,
    Baseline,
    Level,
    Scale,
    average_weight,
    cispo_losses,
    clip_fractions,
    clipped_losses,
    group_advantages,
    group_std,
    log_ratios,
    overlong_penalties,
    sapo_losses,
    token_weights,
    truncated_weights,
)

_CLIP, _CAP, _EPS = 0.2, 5.0, 1e-8
_SAMPLER_LOGPS = "sampler_logps"
_POSITIVE, _NEGATIVE = 1.0, 1.05


@ObjectiveConfig.register_subclass("grpo")
@dataclass(frozen=True)
class Grpo(ReferencedObjective):
    """Groups of responses with rewards (`data.type: groups` or `rollouts`): responses that are better than the others of
    their group become more likely, within limits around the model that sampled them.

    Attributes:
        policy_loss: `clip` (PPO's clipped ratio), `cispo`, or `sapo`, which saturates instead of clipping.
        clip_eps: the ratio of a token's probability to that under the sampling model is clipped below 1 minus this, and above
            1 plus this.
        clip_eps_high: the upper limit, if it differs; null is `clip_eps`. DAPO has 0.28.
        dual_clip: the largest loss of a token with a negative advantage, in units of the advantage; null has no limit.
        cispo_cap: the largest weight of a token, for `cispo`.
        sapo_positive_temperature, sapo_negative_temperature: how fast `sapo` saturates as the ratio moves away from 1, for
            positive and for negative advantages.
        importance: the ratio is that of each `token`, or of the whole `sequence`, normalized by its length (GSPO).
        old_policy: the model that sampled the responses, whose probabilities the ratios compare with: the `reference`, for
            stored groups; `rollout`, the probabilities that the sampler has recorded (`data.type: rollouts`); or `model`, the
            one that trains, so that all ratios are 1.
        tis_cap: with `old_policy: model` and `data.type: rollouts`, weight each token by the ratio of its probability to that
            which the sampler has recorded, at most this (truncated importance sampling); null weights none.
        scale: divide advantages by the standard deviation of their `group`, or by nothing: `none` (Dr. GRPO).
        baseline: subtract the `mean` of the group from the rewards, or that of the others: `leave_one_out` (RLOO).
        std_ddof: what is subtracted from the number of responses in the variance: 0, or 1 as in TRL, verl and Tunix.
        eps: added to the standard deviation. TRL has 1e-4, verl and Tunix 1e-6.
        loss_agg: average over all tokens (`token_mean`, as DAPO), over responses of the mean or the sum of their tokens
            (`seq_mean_token_mean`, as GRPO; `seq_mean_token_sum`), or over responses of the sum of their tokens divided by
            `max_response_tokens` (`dr_grpo`).
        max_response_tokens: the constant length of `dr_grpo`, and the length from which `overlong_cache` subtracts 1.
        overlong_cache: subtract up to 1 from the reward of a response that has fewer than this many tokens left until
            `max_response_tokens` (DAPO's soft overlong punishment); null subtracts nothing.
        kl_coef: weight of the KL divergence from the reference; 0 disables it.
        kl_estimator: `k1`, `k2`, `k3` or `squared` (twice k2).
        kl_level: the estimator reads the log-ratio of each `token`, or their mean over the `sequence`.
    """

    batch_types: ClassVar[tuple[type, ...]] = (GroupBatch,)
    sequences_axis: ClassVar[str | None] = GROUP

    policy_loss: Literal["clip", "cispo", "sapo"] = "clip"
    clip_eps: BelowOne = _CLIP
    clip_eps_high: NonNegativeFloat | None = None
    dual_clip: Annotated[float, Interval(gt=1, le=LARGEST_FLOAT)] | None = None
    cispo_cap: PositiveFloat = _CAP
    sapo_positive_temperature: PositiveFloat = _POSITIVE
    sapo_negative_temperature: PositiveFloat = _NEGATIVE
    importance: Level = "token"
    old_policy: Literal["reference", "rollout", "model"] = "reference"
    tis_cap: PositiveFloat | None = None
    scale: Scale = "group"
    baseline: Baseline = "mean"
    std_ddof: Annotated[int, Interval(ge=0, le=1)] = 0
    eps: PositiveFloat = _EPS
    loss_agg: Average = "token_mean"
    max_response_tokens: PositiveInt | None = None
    overlong_cache: PositiveInt | None = None
    kl_coef: NonNegativeFloat = 0.01
    kl_estimator: Literal["k1", "k2", "k3", "squared"] = "k3"
    kl_level: Level = "token"

    def __post_init__(self):
        of_loss: dict[str, dict[str, Any]] = {
            "clip": {"clip_eps": _CLIP, "clip_eps_high": None, "dual_clip": None},
            "cispo": {"cispo_cap": _CAP},
            "sapo": {"sapo_positive_temperature": _POSITIVE, "sapo_negative_temperature": _NEGATIVE},
        }
        for name, keys in of_loss.items():
            self._check_effective(self.policy_loss == name, f"policy_loss: {self.policy_loss}", **keys)
            self._check_effective(self.old_policy != "model", "old_policy: model", **keys)
        self._check_effective(self.old_policy != "model", "old_policy: model", importance="token")
        self._check_effective(self.old_policy == "model", f"old_policy: {self.old_policy}", tis_cap=None)
        self._check_effective(self.scale == "group", "scale: none", eps=_EPS)
        self._check_effective(self.kl_coef > 0, "kl_coef: 0", kl_estimator="k3", kl_level="token")
        self._check_max_response_tokens()
        if self.needs_reference and self.reference == "none":
            raise ConfigError(
                "objective.reference: none given, but old_policy: reference and kl_coef above 0 need one. Remove it, or set"
                " another old_policy and kl_coef: 0"
            )
        self.check_reference()

    def _check_max_response_tokens(self) -> None:
        divides, cache, most = self.loss_agg == "dr_grpo", self.overlong_cache, self.max_response_tokens
        self._check_effective(divides or cache is not None, f"loss_agg: {self.loss_agg}", max_response_tokens=None)
        if most is None and (divides or cache is not None):
            why = "loss_agg: dr_grpo divides by it" if divides else "overlong_cache is counted from it"
            raise ConfigError(
                f"objective.max_response_tokens: missing. {why}; set it to the limit with which the responses were sampled"
            )
        if cache is not None and most is not None and cache > most:
            raise ConfigError(
                f"objective.overlong_cache: {cache} given, at most max_response_tokens ({most}) expected. Lower it"
            )

    def check_columns(self, columns: Collection[str]) -> None:
        is_sampled = _SAMPLER_LOGPS in columns
        needs = {"old_policy": self.old_policy == "rollout", "tis_cap": self.tis_cap is not None}
        for key in (key for key, is_needed in needs.items() if is_needed and not is_sampled):
            raise ConfigError(
                f"objective.{key}: {getattr(self, key)} given, but the data does not record the probabilities of its"
                f" sampler. Set data.type: rollouts, or remove objective.{key}"
            )
        if is_sampled and self.old_policy == "reference":
            raise ConfigError(
                "objective.old_policy: reference given, but the model that trains samples the responses (data.type:"
                " rollouts). Set objective.old_policy: rollout"
            )
        if is_sampled and self.cache:
            raise ConfigError(
                "objective.cache: true given, but the responses are sampled during training, so no reference can be asked"
                " about them before it. Remove it"
            )

    def _check_effective(self, condition: bool, because: str, **defaults: Any) -> None:
        """Raises `ConfigError` for a key that has another value than its default although it has no effect."""
        for key, default in defaults.items():
            if not condition and getattr(self, key) != default:
                raise ConfigError(
                    f"objective.{key}: {getattr(self, key)} given, which has no effect with {because}. Remove one of them"
                )

    @property
    def needs_reference(self) -> bool:
        return self.old_policy == "reference" or self.kl_coef > 0

    def reference_logps(self, model: LanguageModel, batch: GroupBatch) -> NamedArray:
        """{batch, group, position}: of each token."""
        return _by_group(token_logps(model, batch.sequences(), temperature=batch.temperature)[0], batch)

    def weights(self, batch: GroupBatch) -> dict[str, jax.Array]:
        """The denominators of the loss and of the KL divergence, and the number of tokens that are not padding."""
        mask = batch.responses.loss_mask
        position_last = mask.rearrange((*(axis for axis in mask.axes if axis.name != POSITION), POSITION))
        denominator = average_weight(position_last.array, self.loss_agg, self.max_response_tokens)
        kl = {"kl": denominator} if self.kl_coef else {}
        return {"loss": denominator, **kl, AUXILIARY: auxiliary_weight(batch.responses)}

    def terms(
        self, model: LanguageModel, batch: GroupBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss terms `loss`, `kl` if it has a weight, and the layers' auxiliary losses.

        The metrics have TRL's names: `reward` and `reward_std` (of the groups), `frac_reward_zero_std`, `kl`, `entropy`,
        `clip_ratio/low_mean`, `clip_ratio/high_mean`, `completions/mean_length`; `loss` is the policy loss alone. With the
        sampler's probabilities, `sampling/logp_diff_mean` and `_max` say how far ours are from them.
        """
        sequences = batch.sequences()
        logps, entropies, aux = token_logps_and_entropies(model, sequences, key=key, temperature=batch.temperature)
        logps_NS, entropy_NS, mask_NS = (
            a.rearrange((BATCH, POSITION)).array for a in (logps, entropies, sequences.loss_mask)
        )
        reference_NS = None if batch.annotations is None else _by_sequence(batch.annotations.logps)
        sampler_NS = None if batch.sampler_logps is None else _by_sequence(batch.sampler_logps)
        old = {"reference": reference_NS, "rollout": sampler_NS, "model": jax.lax.stop_gradient(logps_NS)}
        old_NS = old[self.old_policy]
        assert old_NS is not None, "a reference has annotated the batch, or its sampler has recorded its probabilities"
        rewards_BG = batch.rewards.rearrange((BATCH, GROUP)).array
        shaped_BG = self._shaped(rewards_BG, mask_NS)
        options: Any = {"scale": self.scale, "baseline": self.baseline, "std_ddof": self.std_ddof, "eps": self.eps}
        advantage_N = group_advantages(shaped_BG, **options).reshape(-1)
        ratio_NS = log_ratios(logps_NS, old_NS, mask_NS, self.importance)
        losses_NS = self._policy_losses(ratio_NS, logps_NS, advantage_N)
        if self.tis_cap is not None:
            assert sampler_NS is not None, "see check_columns"
            losses_NS *= truncated_weights(logps_NS, sampler_NS, mask_NS, self.tis_cap)
        weights, weight_NS = self.weights(batch), token_weights(mask_NS, self.loss_agg)
        loss = Sum(jnp.sum(jnp.where(mask_NS > 0, losses_NS * weight_NS, 0.0)), weights["loss"])
        minimized = {"loss": loss}
        metrics = {
            "loss": loss,
            "entropy": Sum(jnp.sum(entropy_NS * mask_NS), jnp.sum(mask_NS)),
            **self._reward_metrics(rewards_BG, shaped_BG, batch),
            **_clip_metrics(self, ratio_NS, advantage_N, mask_NS),
            **({} if sampler_NS is None else _sampler_metrics(logps_NS, sampler_NS, mask_NS)),
        }
        if self.kl_coef:
            assert reference_NS is not None, "a reference has annotated the batch"
            kl_NS = KL_ESTIMATORS[self.kl_estimator](log_ratios(logps_NS, reference_NS, mask_NS, self.kl_level))
            minimized["kl"] = Sum(self.kl_coef * jnp.sum(kl_NS * weight_NS), weights["kl"])
            metrics["kl"] = Sum(jnp.sum(kl_NS * mask_NS), jnp.sum(mask_NS))
        aux_terms, aux_metrics = auxiliary_terms(aux)
        return {**minimized, **aux_terms}, metrics | aux_metrics, slot

    @property
    def limits(self) -> tuple[float, float]:
        """How far below and above 1 the ratio is clipped."""
        return self.clip_eps, self.clip_eps if self.clip_eps_high is None else self.clip_eps_high

    def _policy_losses(self, ratio_NS: jax.Array, logps_NS: jax.Array, advantage_N: jax.Array) -> jax.Array:
        if self.policy_loss == "cispo":
            return cispo_losses(ratio_NS, logps_NS, advantage_N, self.cispo_cap)
        if self.policy_loss == "sapo":
            temperatures = self.sapo_positive_temperature, self.sapo_negative_temperature
            return sapo_losses(ratio_NS, advantage_N, *temperatures)
        return clipped_losses(ratio_NS, advantage_N, *self.limits, self.dual_clip)

    def _shaped(self, rewards_BG: jax.Array, mask_NS: jax.Array) -> jax.Array:
        """The rewards with what is subtracted from those of long responses."""
        if self.overlong_cache is None:
            return rewards_BG
        assert self.max_response_tokens is not None, "see _check_max_response_tokens"
        lengths_BG = jnp.sum(mask_NS > 0, axis=1).reshape(rewards_BG.shape)
        return rewards_BG + overlong_penalties(lengths_BG, self.max_response_tokens, self.overlong_cache)

    def _reward_metrics(self, rewards_BG: jax.Array, shaped_BG: jax.Array, batch: GroupBatch) -> Metrics:
        mask_BGS = batch.responses.loss_mask.rearrange((BATCH, GROUP, POSITION)).array
        has_tokens_BG = jnp.any(mask_BGS > 0, axis=-1).astype(jnp.float32)
        is_group_B = jnp.max(has_tokens_BG, axis=-1)
        num_groups, num_responses = jnp.sum(is_group_B), jnp.sum(has_tokens_BG)
        std_B = group_std(shaped_BG, self.std_ddof)
        overlong = {}
        if self.overlong_cache is not None:
            overlong["overlong_penalty"] = Sum(jnp.sum((shaped_BG - rewards_BG) * has_tokens_BG), num_responses)
        return overlong | {
            "reward": Sum(jnp.sum(rewards_BG * has_tokens_BG), num_responses),
            "reward_std": Sum(jnp.sum(std_B * is_group_B), num_groups),
            "frac_reward_zero_std": Sum(jnp.sum((std_B == 0) * is_group_B), num_groups),
            "completions/mean_length": Sum(jnp.sum(mask_BGS > 0, dtype=jnp.float32), num_responses),
        }


def _clip_metrics(objective: Grpo, ratio_NS: jax.Array, advantage_N: jax.Array, mask_NS: jax.Array) -> Metrics:
    if objective.policy_loss != "clip":
        return {}
    sides = zip(("low", "high"), clip_fractions(ratio_NS, advantage_N, *objective.limits), strict=True)
    # Ratios of whole responses count once each.
    weight_NS = token_weights(mask_NS, "seq_mean_token_mean") if objective.importance == "sequence" else mask_NS
    total = jnp.sum(weight_NS)
    return {f"clip_ratio/{side}_mean": Sum(jnp.sum(is_clipped * weight_NS), total) for side, is_clipped in sides}


def _sampler_metrics(logps_NS: jax.Array, sampler_NS: jax.Array, mask_NS: jax.Array) -> Metrics:
    """How far our log-likelihoods are from those of the sampler, which had the same weights in the first update."""
    distance_NS = jnp.where(mask_NS > 0, jnp.abs(jax.lax.stop_gradient(logps_NS) - sampler_NS), 0.0)
    return {
        "sampling/logp_diff_mean": Sum(jnp.sum(distance_NS), jnp.sum(mask_NS > 0, dtype=jnp.float32)),
        "sampling/logp_diff_max": Largest(jnp.max(distance_NS)),
    }


def _by_sequence(of_group: NamedArray) -> jax.Array:
    """[N, S]: {batch, group, position} in the order of `GroupBatch.sequences`."""
    array = of_group.rearrange((BATCH, GROUP, POSITION)).array
    return array.reshape(-1, array.shape[-1])


def _by_group(of_tokens: NamedArray, batch: GroupBatch) -> NamedArray:
    """{batch, position} of `GroupBatch.sequences` to {batch, group, position}."""
    tokens = batch.responses.tokens
    return of_tokens.unflatten_axis(BATCH, (tokens.resolve_axis(BATCH), tokens.resolve_axis(GROUP)))
