"""Group relative policy optimization, on groups of responses: stored ones, or those that the model samples as it trains.

Source: Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), equation 3; advantages, clipping, KL estimators and averages of
the variants are in `jaxlm.objectives.policy_losses`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import haliax as hax
import jax
import jax.numpy as jnp
from annotated_types import Interval
from haliax import NamedArray

from jaxlm.core.axes import BATCH, GROUP, POSITION, REWARD
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import AboveOne, BelowOne, NonNegativeFloat, PositiveFloat, PositiveFraction, PositiveInt
from jaxlm.core.types import GroupBatch, Sum
from jaxlm.models.base import AuxLoss, LanguageModel
from jaxlm.objectives.base import AUXILIARY, Metrics, ObjectiveConfig, auxiliary_terms, auxiliary_weight
from jaxlm.objectives.completions import ReferencedObjective, token_logps, token_logps_and_entropies
from jaxlm.objectives.entropy_control import EntropyControl, coefficient_of, with_entropies
from jaxlm.objectives.policy_losses import (
    KL_ESTIMATORS,
    Average,
    Baseline,
    Correction,
    Importance,
    Level,
    Scale,
    average_weight,
    batch_std,
    check_vespo_weights,
    cispo_losses,
    clipped_losses,
    gmpo_losses,
    group_advantages,
    log_ratios,
    most_uncertain,
    on_policy_weights,
    overlong_penalties,
    sampler_weights,
    sapo_losses,
    token_weights,
    vespo_losses,
)
from jaxlm.objectives.response_tokens import (
    ResponseTokens,
    by_sequence,
    clip_metrics,
    reward_metrics,
    sampler_metrics,
)
from jaxlm.objectives.reward_parts import decoupled_advantages

_CLIP, _CAP, _EPS = 0.2, 5.0, 1e-8
_SAMPLER_LOGPS = "sampler_logps"
_POSITIVE, _NEGATIVE = 1.0, 1.05
_VESPO_POSITIVE, _VESPO_NEGATIVE = (2.0, 3.0), (3.0, 2.0)
_OF_BATCH = ("batch", "batch_advantages")
_DELTA = 0.005
_SMALLEST_LOG_WEIGHT, _LARGEST_LOG_WEIGHT = -18.420681, 20.0  # of `vespo`, as in policy_losses


@ObjectiveConfig.register_subclass("grpo")
@dataclass(frozen=True)
class Grpo(ReferencedObjective):
    """Groups of responses with rewards (`data.type: groups` or `rollouts`): responses that are better than the others of
    their group become more likely, within limits around the model that sampled them.

    Attributes:
        policy_loss: `clip` (PPO's clipped ratio), `gmpo` (the same of the geometric mean of the tokens' ratios), `cispo`,
            `sapo`, which saturates instead of clipping, or `vespo`, which weights whole responses by a smooth function.
        clip_eps: the ratio of a token's probability to that under the sampling model is clipped below 1 minus this, and above
            1 plus this. With `gmpo`, the logarithm of the ratio stays within this distance of 0; the paper has 0.4.
        clip_eps_high: the upper limit, if it differs; null is `clip_eps`. DAPO has 0.28.
        dual_clip: the largest loss of a token with a negative advantage, in units of the advantage; null has no limit.
        cispo_cap: the largest weight of a token, for `cispo`.
        sapo_positive_temperature, sapo_negative_temperature: how fast `sapo` saturates as the ratio moves away from 1, for
            positive and for negative advantages.
        vespo_positive_power, vespo_negative_power: how fast the weight of `vespo` falls for responses that have become less
            likely, for positive and for negative advantages: the power of the ratio.
        vespo_positive_decay, vespo_negative_decay: how fast it falls for those that have become more likely. At the ratio of
            power and decay, the weight is largest; no response may count more than e^20 times as much as without a weight.
        importance: the ratio is that of each `token`; of the whole `sequence`, normalized by its length (GSPO); or of the
            whole sequence as it is, `sequence_product` (RLOO).
        old_policy: the model that sampled the responses, whose probabilities the ratios compare with: the `reference`, for
            stored groups; `rollout`, the probabilities that the sampler has recorded (`data.type: rollouts`); or `model`, the
            one that trains, so that all ratios are 1.
        tis_cap: with `old_policy: model` and `data.type: rollouts`, weight each token by the ratio of its probability to that
            which the sampler has recorded, at most this (truncated importance sampling); null weights none.
        tis_floor: the smallest such weight.
        tis_mode: weight by the ratio of each token, or of the whole response (`sequence_...`); a ratio that is not between
            `tis_floor` and `tis_cap` becomes the limit (`..._truncate`), or 0 (`..._mask`).
        mask_truncated: leave responses that `data.max_new_tokens` has cut off out of the loss, but not out of the advantages
            of the others.
        off_policy_threshold: leave out responses with a negative advantage that have become less likely by more than this, in
            nats a token, since they were sampled (DeepSeek-V3.2); null leaves none out.
        aggregation: add the rewards and normalize their sum as `scale` says, or normalize each reward in its group, add them,
            and normalize the sum in the batch: `normalize_then_sum` (GDPO).
        scale: divide advantages by the standard deviation of the rewards of their `group`, of the rewards of the whole
            `batch`, or of all advantages of the batch (`batch_advantages`, as REINFORCE++), or by nothing: `none` (Dr. GRPO).
        baseline: subtract the `mean` of the group from the rewards, or that of the others: `leave_one_out` (RLOO).
        std_ddof: what is subtracted from the number of responses in the variance: 0, or 1 as in TRL, verl and Tunix.
        eps: added to the standard deviation. TRL has 1e-4, verl and Tunix 1e-6.
        loss_agg: average over all tokens (`token_mean`, as DAPO), over responses of the mean or the sum of their tokens
            (`seq_mean_token_mean`, as GRPO; `seq_mean_token_sum`), or over responses of the sum of their tokens divided by
            `max_response_tokens` (`dr_grpo`).
        max_response_tokens: the constant length of `dr_grpo`, and the length from which `overlong_cache` subtracts 1.
        overlong_cache: subtract up to 1 from the reward of a response that has fewer than this many tokens left until
            `max_response_tokens` (DAPO's soft overlong punishment); null subtracts nothing.
        top_entropy: the share of the tokens of a batch, those with the largest entropies, that the policy loss counts.
        entropy_coef: weight of the mean entropy of the tokens that the policy loss counts, which is maximized; 0 disables it.
        entropy_target: change `entropy_coef` after each update, from its value on: it goes up while the mean entropy of these
            tokens is at most this, in nats, and down otherwise. It is in use only while the entropy is that low
            (Skywork-OR1). Null keeps the coefficient fixed.
        entropy_coef_delta: how far it goes up or down in an update.
        entropy_coef_min, entropy_coef_max: its limits.
        kl_coef: weight of the KL divergence from the reference; 0 disables it.
        kl_estimator: `k1`, `k2`, `k3` or `squared` (twice k2).
        kl_level: the estimator reads the log-ratio of each `token`, or their mean over the `sequence`.
        kl_unbiased: multiply the estimate by the ratio, so that its gradient is that of the KL divergence (DeepSeek-V3.2).
        kl_in_reward: subtract the sampling model's KL divergence, summed over the response, from its reward, and not from the
            loss.
    """

    batch_types: ClassVar[tuple[type, ...]] = (GroupBatch,)
    sequences_axis: ClassVar[str | None] = GROUP

    policy_loss: Literal["clip", "gmpo", "cispo", "sapo", "vespo"] = "clip"
    clip_eps: BelowOne = _CLIP
    clip_eps_high: NonNegativeFloat | None = None
    dual_clip: AboveOne | None = None
    cispo_cap: PositiveFloat = _CAP
    sapo_positive_temperature: PositiveFloat = _POSITIVE
    sapo_negative_temperature: PositiveFloat = _NEGATIVE
    vespo_positive_power: PositiveFloat = _VESPO_POSITIVE[0]
    vespo_positive_decay: PositiveFloat = _VESPO_POSITIVE[1]
    vespo_negative_power: PositiveFloat = _VESPO_NEGATIVE[0]
    vespo_negative_decay: PositiveFloat = _VESPO_NEGATIVE[1]
    importance: Importance = "token"
    old_policy: Literal["reference", "rollout", "model"] = "reference"
    tis_cap: PositiveFloat | None = None
    tis_floor: NonNegativeFloat = 0.0
    tis_mode: Correction = "token_truncate"
    mask_truncated: bool = False
    off_policy_threshold: PositiveFloat | None = None
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    scale: Scale = "group"
    baseline: Baseline = "mean"
    std_ddof: Annotated[int, Interval(ge=0, le=1)] = 0
    eps: PositiveFloat = _EPS
    loss_agg: Average = "token_mean"
    max_response_tokens: PositiveInt | None = None
    overlong_cache: PositiveInt | None = None
    top_entropy: PositiveFraction = 1.0
    entropy_coef: NonNegativeFloat = 0.0
    entropy_target: NonNegativeFloat | None = None
    entropy_coef_delta: PositiveFloat = _DELTA
    entropy_coef_min: NonNegativeFloat = 0.0
    entropy_coef_max: PositiveFloat = 1.0
    kl_coef: NonNegativeFloat = 0.01
    kl_estimator: Literal["k1", "k2", "k3", "squared"] = "k3"
    kl_level: Level = "token"
    kl_unbiased: bool = False
    kl_in_reward: bool = False

    def __post_init__(self):
        vespo = {
            f"vespo_{sign}_{name}": default
            for sign, both in (("positive", _VESPO_POSITIVE), ("negative", _VESPO_NEGATIVE))
            for name, default in zip(("power", "decay"), both, strict=True)
        }
        of_losses: dict[tuple[str, ...], dict[str, Any]] = {
            ("clip", "gmpo"): {"clip_eps": _CLIP, "clip_eps_high": None},
            ("clip",): {"dual_clip": None},
            ("cispo",): {"cispo_cap": _CAP},
            ("sapo",): {"sapo_positive_temperature": _POSITIVE, "sapo_negative_temperature": _NEGATIVE},
            ("vespo",): vespo,
            ("clip", "cispo", "sapo"): {"importance": "token"},
        }
        for names, keys in of_losses.items():
            self._check_effective(self.policy_loss in names, f"policy_loss: {self.policy_loss}", **keys)
            self._check_effective(self.old_policy != "model", "old_policy: model", **keys)
        self._check_effective(self.old_policy == "model", f"old_policy: {self.old_policy}", tis_cap=None)
        self._check_effective(self.tis_cap is not None, "tis_cap: null", tis_floor=0.0, tis_mode="token_truncate")
        self._check_effective(self.scale != "none", "scale: none", eps=_EPS)
        of_sum = {"scale": "group", "baseline": "mean", "overlong_cache": None, "kl_in_reward": False}
        is_of_sum = self.aggregation == "sum_then_normalize"
        self._check_effective(is_of_sum, f"aggregation: {self.aggregation}", **of_sum)
        of_target = {"entropy_coef_delta": _DELTA, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0}
        self._check_effective(self.entropy_target is not None, "entropy_target: null", **of_target)
        of_kl = {"kl_estimator": "k3", "kl_level": "token", "kl_unbiased": False, "kl_in_reward": False}
        self._check_effective(self.kl_coef > 0, "kl_coef: 0", **of_kl)
        self._check_effective(not self.kl_in_reward, "kl_in_reward: true", kl_level="token", kl_unbiased=False)
        self._check_effective(self.old_policy != "reference", "old_policy: reference", kl_in_reward=False)
        if self.kl_in_reward and self.scale in _OF_BATCH:
            raise ConfigError(
                f"objective.scale: {self.scale} given with kl_in_reward: true, but the rewards of a whole batch are not known"
                " with their KL divergences before it is split into microbatches. Set scale to group or none"
            )
        check_vespo_weights("positive", self.vespo_positive_power, self.vespo_positive_decay)
        check_vespo_weights("negative", self.vespo_negative_power, self.vespo_negative_decay)
        self._check_limits()
        self._check_max_response_tokens()
        if self.needs_reference and self.reference == "none":
            raise ConfigError(
                "objective.reference: none given, but old_policy: reference and kl_coef above 0 need one. Remove it, or set"
                " another old_policy and kl_coef: 0"
            )
        self.check_reference()

    def _check_limits(self) -> None:
        for low, high in (("tis_floor", "tis_cap"), ("entropy_coef_min", "entropy_coef_max")):
            least, most = getattr(self, low), getattr(self, high)
            if most is not None and least > most:
                raise ConfigError(f"objective.{low}: {least:g} given, at most {high} ({most:g}) expected. Lower it")
        lowest, highest = self.entropy_coef_min, self.entropy_coef_max
        if self.entropy_target is not None and not lowest <= self.entropy_coef <= highest:
            raise ConfigError(
                f"objective.entropy_coef: {self.entropy_coef:g} given, from entropy_coef_min ({lowest:g}) to entropy_coef_max"
                f" ({highest:g}) expected, because the coefficient starts there. Raise or lower it"
            )
        if self.policy_loss == "vespo" and not self.tis_mode.startswith("token"):
            raise ConfigError(
                f"objective.tis_mode: {self.tis_mode} given with policy_loss: vespo, which builds the weight of a"
                " response from those of its tokens. Set token_truncate or token_mask"
            )

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
        of_model = self.old_policy == "model" and self.off_policy_threshold is not None
        probabilities = "the probabilities of its sampler"
        needs = {
            "old_policy": (self.old_policy == "rollout", _SAMPLER_LOGPS, probabilities),
            "tis_cap": (self.tis_cap is not None, _SAMPLER_LOGPS, probabilities),
            "off_policy_threshold": (of_model, _SAMPLER_LOGPS, probabilities),
            "mask_truncated": (self.mask_truncated, "finished", "which responses have been cut off"),
            "aggregation": (not self._adds_rewards, "reward_parts", "the rewards that it is the sum of"),
        }
        for key in (key for key, (is_needed, column, _) in needs.items() if is_needed and column not in columns):
            raise ConfigError(
                f"objective.{key}: {getattr(self, key)} given, but the data does not record {needs[key][2]}. Set data.type:"
                f" rollouts, or remove objective.{key}"
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

    def check_batch(self, batch: GroupBatch) -> None:
        if not batch.samples_all and self.old_policy == "model" and self.tis_cap is None:
            raise ConfigError(
                "objective.old_policy: model given, but data.top_k, top_p, min_p or repetition_penalty has responses sampled"
                " from another distribution than that of the model. Set objective.tis_cap, which corrects for it, or"
                " old_policy: rollout"
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

    @property
    def compares_examples(self) -> bool:
        return self.top_entropy < 1

    def weights(self, batch: GroupBatch) -> dict[str, jax.Array]:
        """The denominators of the loss, the KL divergence and the entropy, and the number of tokens that are not padding."""
        whole, counted = _position_last(batch.responses.loss_mask), _position_last(self._counted(batch))
        of = counted if self.loss_agg == "token_mean" else whole  # responses that are left out still count as responses
        denominator = average_weight(of, self.loss_agg, self.max_response_tokens)
        kl = {"kl": denominator} if self._kl_in_loss else {}
        entropy = {"entropy": jnp.sum(counted)} if self._weights_entropy else {}
        return {"loss": denominator, **kl, **entropy, AUXILIARY: auxiliary_weight(batch.responses)}

    def with_batch_statistics(self, batch: GroupBatch) -> GroupBatch:
        lengths = _lengths(batch).rearrange(batch.rewards.axes)
        if not self._adds_rewards:
            return replace(batch, advantages=self._decoupled_advantages(batch, lengths))
        if self.scale not in _OF_BATCH:
            return batch
        shaped = self._shaped(batch.rewards.array, lengths.array)
        options: Any = {"scale": self.scale, "baseline": self.baseline, "std_ddof": self.std_ddof}
        std = batch_std(_group_last(batch.rewards, shaped), _group_last(batch.rewards, lengths.array > 0), **options)
        rows = tuple(axis for axis in batch.rewards.axes if axis.name != GROUP)
        return replace(batch, std_of_batch=hax.full(rows, std, dtype=jnp.float32))

    def _decoupled_advantages(self, batch: GroupBatch, lengths: NamedArray) -> NamedArray:
        assert batch.reward_parts is not None, "see check_columns"
        parts = batch.reward_parts.rearrange((..., GROUP, REWARD))
        rows = tuple(axis for axis in parts.axes if axis.name != REWARD)
        weights, options = jnp.array(batch.reward_weights), {"std_ddof": self.std_ddof, "eps": self.eps}
        found = decoupled_advantages(parts.array, weights, lengths.rearrange(rows).array > 0, **options)
        return hax.named(found, rows)

    def init_statistics(self) -> dict[str, jax.Array]:
        return {} if self._entropy_control is None else self._entropy_control.init()

    def update_statistics(self, statistics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return statistics if self._entropy_control is None else self._entropy_control.after(statistics)

    @property
    def _entropy_control(self) -> EntropyControl | None:
        if self.entropy_target is None:
            return None
        limits = (self.entropy_coef_min, self.entropy_coef_max)
        return EntropyControl(self.entropy_target, self.entropy_coef, self.entropy_coef_delta, *limits)

    @property
    def _weights_entropy(self) -> bool:
        return self.entropy_coef > 0 or self.entropy_target is not None

    @property
    def _adds_rewards(self) -> bool:
        return self.aggregation == "sum_then_normalize"

    def _counted(self, batch: GroupBatch) -> NamedArray:
        """The loss mask, 0 for responses that are left out."""
        if not self.mask_truncated:
            return batch.responses.loss_mask
        assert batch.finished is not None, "see check_columns"
        return batch.responses.loss_mask * batch.finished

    def terms(
        self, model: LanguageModel, batch: GroupBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss terms `loss`, `kl` and `entropy` if they have a weight, and the layers' auxiliary losses.

        The metrics have TRL's names: `reward` and `reward_std` (of the groups), `frac_reward_zero_std`, `kl`, `entropy`,
        `clip_ratio/low_mean`, `clip_ratio/high_mean`, `completions/mean_length`; `loss` is the policy loss alone. With the
        sampler's probabilities, `sampling/logp_diff_mean` and `_max` say how far ours are from them.
        """
        tokens, aux = self._tokens(model, batch, key)
        rewards_BG = batch.rewards.rearrange((BATCH, GROUP)).array
        lengths_BG = _lengths(batch).rearrange((BATCH, GROUP)).array
        shaped_BG = self._shaped(rewards_BG, lengths_BG)
        if self.kl_in_reward:
            # Over all tokens: a response that is left out of the loss still counts in the advantages of its group.
            kl_N = jnp.sum(self._kl_of_sampler(tokens, by_sequence(batch.responses.loss_mask)), axis=1)
            shaped_BG -= self.kl_coef * kl_N.reshape(rewards_BG.shape)
        std_of_batch = None if batch.std_of_batch is None else jnp.max(batch.std_of_batch.array)
        options: Any = {"scale": self.scale, "baseline": self.baseline, "std_ddof": self.std_ddof, "eps": self.eps}
        if batch.advantages is None:
            advantage_N = group_advantages(shaped_BG, **options, std_of_batch=std_of_batch).reshape(-1)
        else:
            advantage_N = batch.advantages.rearrange((BATCH, GROUP)).array.reshape(-1)
        ratio_NS = log_ratios(tokens.logps, tokens.old, tokens.mask, self.importance)
        counted_NS = self._policy_tokens(tokens)
        losses_NS = self._policy_losses(tokens, counted_NS, ratio_NS, advantage_N)
        weights, weight_NS = self.weights(batch), token_weights(tokens.mask, self.loss_agg)
        loss = Sum(jnp.sum(jnp.where(tokens.mask > 0, losses_NS * weight_NS, 0.0)), weights["loss"])
        entropy = Sum(jnp.sum(tokens.entropy * tokens.mask), jnp.sum(tokens.mask))
        minimized = {"loss": loss}
        metrics = {
            "loss": loss,
            "entropy": entropy,
            **reward_metrics(rewards_BG, shaped_BG, batch, self.std_ddof),
            **self._clip_metrics(tokens, ratio_NS, advantage_N),
            **({} if tokens.sampler is None else sampler_metrics(tokens.logps, tokens.sampler, tokens.mask)),
        }
        if self._weights_entropy:
            total, count = jnp.sum(tokens.entropy * counted_NS), jnp.sum(counted_NS)
            coefficient: Any = self.entropy_coef if self.entropy_target is None else coefficient_of(slot.statistics)
            # Its denominator counts all tokens, because which have large entropies is known only here.
            of_all = total * jnp.sum(tokens.mask) / jnp.maximum(count, 1.0)
            minimized["entropy"] = Sum(-coefficient * of_all, weights["entropy"])
            if self.entropy_target is not None:
                metrics["entropy_coef"] = Sum(coefficient * weights["entropy"], weights["entropy"])
                slot = replace(slot, statistics=with_entropies(slot.statistics, total, count))
        if self._kl_in_loss:
            kl_NS = self._kl(tokens, ratio_NS)
            minimized["kl"] = Sum(self.kl_coef * jnp.sum(kl_NS * weight_NS), weights["kl"])
            metrics["kl"] = Sum(jnp.sum(kl_NS * tokens.mask), jnp.sum(tokens.mask))
        elif self.kl_in_reward:
            metrics["kl"] = Sum(jnp.sum(self._kl_of_sampler(tokens, tokens.mask)), jnp.sum(tokens.mask))
        if self.overlong_cache is not None:
            penalty = jnp.sum((self._shaped(rewards_BG, lengths_BG) - rewards_BG) * (lengths_BG > 0))
            metrics["overlong_penalty"] = Sum(penalty, metrics["reward"].weight)
        aux_terms, aux_metrics = auxiliary_terms(aux)
        return {**minimized, **aux_terms}, metrics | aux_metrics, slot

    @property
    def limits(self) -> tuple[float, float]:
        """How far below and above 1 the ratio is clipped."""
        return self.clip_eps, self.clip_eps if self.clip_eps_high is None else self.clip_eps_high

    @property
    def _kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and not self.kl_in_reward

    def _tokens(
        self, model: LanguageModel, batch: GroupBatch, key: jax.Array | None
    ) -> tuple[ResponseTokens, Mapping[str, AuxLoss]]:
        """The numbers of the tokens, and the layers' losses."""
        sequences = batch.sequences()
        options: Any = {"key": key, "temperature": batch.temperature, "entropy_gradient": self._weights_entropy}
        logps, entropies, aux = token_logps_and_entropies(model, sequences, **options)
        logps_NS, entropy_NS = (a.rearrange((BATCH, POSITION)).array for a in (logps, entropies))
        mask_NS = by_sequence(self._counted(batch))
        reference_NS = None if batch.annotations is None else by_sequence(batch.annotations.logps)
        sampler_NS = None if batch.sampler_logps is None else by_sequence(batch.sampler_logps)
        old = {"reference": reference_NS, "rollout": sampler_NS, "model": jax.lax.stop_gradient(logps_NS)}
        old_NS = old[self.old_policy]
        assert old_NS is not None, "a reference has annotated the batch, or its sampler has recorded its probabilities"
        return ResponseTokens(logps_NS, entropy_NS, mask_NS, old_NS, reference_NS, sampler_NS), aux

    def _policy_tokens(self, tokens: ResponseTokens) -> jax.Array:
        """1 for a token that the policy loss counts, float32 [N, S]."""
        if self.top_entropy == 1:
            return tokens.mask
        return tokens.mask * most_uncertain(jax.lax.stop_gradient(tokens.entropy), tokens.mask, self.top_entropy)

    def _policy_losses(
        self, tokens: ResponseTokens, counted_NS: jax.Array, ratio_NS: jax.Array, advantage_N: jax.Array
    ) -> jax.Array:
        corrected_NS: Any = 1.0
        if self.tis_cap is not None:
            assert tokens.sampler is not None, "see check_columns"
            limits = (self.tis_floor, self.tis_cap)
            corrected_NS = sampler_weights(tokens.logps, tokens.sampler, tokens.mask, self.tis_mode, *limits)
            if self.policy_loss == "vespo":  # it weights by a function of the whole ratio
                ratio_NS += jnp.clip(jnp.log(corrected_NS), _SMALLEST_LOG_WEIGHT, _LARGEST_LOG_WEIGHT)
                corrected_NS = 1.0
        losses_NS = corrected_NS * self._plain_policy_losses(tokens, counted_NS, ratio_NS, advantage_N)
        if self.off_policy_threshold is not None:
            threshold = self.off_policy_threshold
            losses_NS *= on_policy_weights(tokens.logps, tokens.sampled, advantage_N, tokens.mask, threshold)
        # The loss of gmpo is that of the whole response at each of its tokens: its mean has left out the others.
        return losses_NS if self.policy_loss == "gmpo" else jnp.where(counted_NS > 0, losses_NS, 0.0)

    def _plain_policy_losses(
        self, tokens: ResponseTokens, counted_NS: jax.Array, ratio_NS: jax.Array, advantage_N: jax.Array
    ) -> jax.Array:
        match self.policy_loss:
            case "clip":
                return clipped_losses(ratio_NS, advantage_N, *self.limits, self.dual_clip)
            case "gmpo":
                return gmpo_losses(ratio_NS, advantage_N, counted_NS, *self.limits)
            case "cispo":
                return cispo_losses(ratio_NS, tokens.logps, advantage_N, self.cispo_cap)
            case "sapo":
                temperatures = self.sapo_positive_temperature, self.sapo_negative_temperature
                return sapo_losses(ratio_NS, advantage_N, *temperatures)
            case "vespo":
                positive = self.vespo_positive_power, self.vespo_positive_decay
                negative = self.vespo_negative_power, self.vespo_negative_decay
                return vespo_losses(ratio_NS, tokens.logps, advantage_N, tokens.mask, positive, negative)

    def _clip_metrics(self, tokens: ResponseTokens, ratio_NS: jax.Array, advantage_N: jax.Array) -> Metrics:
        if self.policy_loss not in ("clip", "gmpo"):
            return {}
        options: Any = {"importance": self.importance, "of_logarithms": self.policy_loss == "gmpo"}
        return clip_metrics(ratio_NS, advantage_N, tokens.mask, self.limits, **options)

    def _kl(self, tokens: ResponseTokens, ratio_NS: jax.Array) -> jax.Array:
        """The estimated KL divergence from the reference at each token, float32 [N, S]."""
        assert tokens.reference is not None, "a reference has annotated the batch"
        of_reference_NS = log_ratios(tokens.logps, tokens.reference, tokens.mask, self.kl_level)
        kl_NS = KL_ESTIMATORS[self.kl_estimator](of_reference_NS)
        return kl_NS * jnp.exp(ratio_NS) if self.kl_unbiased else kl_NS

    def _kl_of_sampler(self, tokens: ResponseTokens, mask_NS: jax.Array) -> jax.Array:
        """The estimated KL divergence of the model that sampled each token from the reference, float32 [N, S]."""
        assert tokens.reference is not None, "a reference has annotated the batch"
        ratio_NS = log_ratios(tokens.sampled, tokens.reference, mask_NS, "token")
        return KL_ESTIMATORS[self.kl_estimator](ratio_NS) * mask_NS

    def _shaped(self, rewards: jax.Array, lengths: jax.Array) -> jax.Array:
        """The rewards with what is subtracted from those of long responses. Args: lengths: in tokens."""
        if self.overlong_cache is None:
            return rewards
        assert self.max_response_tokens is not None, "see _check_max_response_tokens"
        return rewards + overlong_penalties(lengths, self.max_response_tokens, self.overlong_cache)


def _by_group(of_tokens: NamedArray, batch: GroupBatch) -> NamedArray:
    """{batch, position} of `GroupBatch.sequences` to {batch, group, position}."""
    tokens = batch.responses.tokens
    return of_tokens.unflatten_axis(BATCH, (tokens.resolve_axis(BATCH), tokens.resolve_axis(GROUP)))


def _lengths(batch: GroupBatch) -> NamedArray:
    """Tokens of each response, int32 {[microbatch,] batch, group}."""
    return hax.sum((batch.responses.loss_mask > 0).astype(jnp.int32), POSITION)


def _position_last(of_tokens: NamedArray) -> jax.Array:
    return of_tokens.rearrange((..., POSITION)).array


def _group_last(like: NamedArray, array: jax.Array) -> jax.Array:
    """[..., group] of an array with the axes of `like`."""
    return hax.named(array, like.axes).rearrange((..., GROUP)).array
