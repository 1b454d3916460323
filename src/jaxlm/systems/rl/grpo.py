"""Group relative policy optimization, on groups of responses: stored ones, or those that the model samples as it trains.

Source: Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), equation 3; the variants are the choices in
`jaxlm.systems.rl.policy_losses` and `jaxlm.systems.rl.advantages`.
"""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, ClassVar

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import BATCH, GROUP, POSITION, REWARD
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveFloat, PositiveFraction
from jaxlm.core.rules import Rules, excludes
from jaxlm.core.values.batch_types import GroupBatch
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import AuxLoss, LanguageModel
from jaxlm.models.chunked_loss import ChunkLogits
from jaxlm.models.inference.responses import check_samples_as_trained
from jaxlm.objectives.base import AUXILIARY, Metrics, ObjectiveConfig, ObjectiveFacts, auxiliary_terms, auxiliary_weight
from jaxlm.objectives.completions import ReferencedObjective, token_logps
from jaxlm.reading.choices import choice
from jaxlm.systems.rl.advantages import (
    Advantage,
    Entropy,
    NormalizeThenSum,
    OfBatch,
    OfGroup,
    OfSum,
    Overlong,
    ResponseTokens,
    by_sequence,
    coefficient_of,
    reward_metrics,
    sampler_metrics,
    with_entropies,
)
from jaxlm.systems.rl.policy_losses import (
    LARGEST_LOG_WEIGHT,
    SMALLEST_LOG_WEIGHT,
    Clip,
    ImportanceSampling,
    Kl,
    KlInLoss,
    KlInReward,
    LossAgg,
    OfModel,
    OfReference,
    OfRollout,
    OldPolicy,
    PolicyLoss,
    TokenMean,
    clip_metrics,
    log_ratios,
    most_uncertain,
    on_policy_weights,
)

_SAMPLING = "old_policy.importance_sampling"


@choice(ObjectiveConfig, "grpo")
class Grpo(ReferencedObjective):
    """Groups of responses with rewards (`data.type: groups` or `rollouts`): responses that are better than the others of
    their group become more likely, within limits around the model that sampled them.

    Attributes:
        loss: what is minimized at each token: `clip` (PPO's clipped ratio), `gmpo` (the same of the geometric mean of the
            tokens' ratios), `cispo`, `sapo`, which saturates instead of clipping, or `vespo`, which weights whole responses
            by a smooth function. The name alone has its default keys.
        loss_agg: average over all tokens (`token_mean`, as DAPO), over responses of the mean or the sum of their tokens
            (`seq_mean_token_mean`, as GRPO; `seq_mean_token_sum`), or over responses of the sum of their tokens divided by a
            constant (`dr_grpo`).
        old_policy: the model that sampled the responses, whose probabilities the ratios compare with: the `reference`, for
            stored groups; `rollout`, the probabilities that the sampler has recorded (`data.type: rollouts`); or `model`, the
            one that trains, so that all ratios are 1.
        advantage: add the rewards and divide what is above the baseline by the standard deviation of the `group` (GRPO), by
            one of the whole `batch`, or by nothing: `unscaled` (Dr. GRPO, RLOO). Or normalize each reward in its group, add
            them, and normalize the sum in the batch: `normalize_then_sum` (GDPO).
        overlong: subtract up to 1 from the rewards of long responses (DAPO's soft overlong punishment); null subtracts
            nothing.
        kl: add the KL divergence from the reference to the `loss`, or subtract it from the rewards: `reward`. Null disables
            it.
        entropy: maximize the entropy too.
        mask_truncated: leave responses that `data.max_new_tokens` has cut off out of the loss, but not out of the advantages
            of the others.
        off_policy_threshold: leave out responses with a negative advantage that have become less likely by more than this, in
            nats a token, since they were sampled (DeepSeek-V3.2); null leaves none out.
        top_entropy: the share of the tokens of a batch, those with the largest entropies, that the policy loss counts.
    """

    loss: PolicyLoss = field(default_factory=Clip)
    loss_agg: LossAgg = field(default_factory=TokenMean)
    old_policy: OldPolicy = field(default_factory=OfReference)
    advantage: Advantage = field(default_factory=OfGroup)
    overlong: Overlong | None = None
    kl: Kl | None = field(default_factory=KlInLoss)
    entropy: Entropy = field(default_factory=Entropy)
    mask_truncated: bool = False
    off_policy_threshold: PositiveFloat | None = None
    top_entropy: PositiveFraction = 1.0

    key_rules: ClassVar[Rules] = (
        excludes("overlong", when="advantage", is_=NormalizeThenSum, why="which does not read the sum of the rewards"),
    )

    def __post_init__(self):
        sampling = self._importance_sampling
        if isinstance(self.old_policy, OfModel) and self.loss != type(self.loss)():
            raise ConfigError(
                "objective.loss: keys given, which have no effect with old_policy: model, because all ratios are 1. Give the"
                " name of the loss alone, or set another old_policy"
            )
        if sampling is not None and self.loss.corrects_ratio and not sampling.is_of_tokens:
            raise ConfigError(
                f"objective.{_SAMPLING}.mode: {sampling.mode} given with loss: vespo, which builds the weight of a response"
                " from those of its tokens. Set token_truncate or token_mask"
            )
        if isinstance(self.kl, KlInReward) and isinstance(self.advantage, (OfBatch, NormalizeThenSum)):
            raise ConfigError(
                f"objective.advantage: {self.advantage.get_choice_name(type(self.advantage))} given with kl: reward, but the"
                " rewards of a whole batch are not known with their KL divergences before it is split into microbatches. Set"
                " advantage to group or unscaled"
            )
        if isinstance(self.kl, KlInReward) and isinstance(self.old_policy, OfReference):
            raise ConfigError(
                "objective.kl: reward given with old_policy: reference, which does not diverge from itself. Set another"
                " old_policy, or kl: loss"
            )
        if self.needs_reference and self.reference == "none":
            raise ConfigError(
                "objective.reference: none given, but old_policy: reference and a KL divergence need one. Remove it, or set"
                " another old_policy and kl: null"
            )
        self.check_reference()

    def check(self, batch: GroupBatch, model: LanguageModel, trainable: Any) -> None:
        is_sampled = batch.sampler_logps is not None
        of_model = isinstance(self.old_policy, OfModel) and self.off_policy_threshold is not None
        probabilities, is_of_parts = "the probabilities of its sampler", isinstance(self.advantage, NormalizeThenSum)
        needs = {
            "old_policy: rollout": (isinstance(self.old_policy, OfRollout), batch.sampler_logps, probabilities),
            _SAMPLING: (self._importance_sampling is not None, batch.sampler_logps, probabilities),
            "off_policy_threshold": (of_model, batch.sampler_logps, probabilities),
            "mask_truncated": (self.mask_truncated, batch.finished, "which responses have been cut off"),
            "advantage: normalize_then_sum": (is_of_parts, batch.reward_parts, "the rewards that it is the sum of"),
        }
        for key in (key for key, (is_needed, column, _) in needs.items() if is_needed and column is None):
            raise ConfigError(
                f"objective.{key} given, but the data does not record {needs[key][2]}. Set data.type: rollouts, or remove it"
            )
        if is_sampled and isinstance(self.old_policy, OfReference):
            raise ConfigError(
                "objective.old_policy: reference given, but the model that trains samples the responses (data.type:"
                " rollouts). Set objective.old_policy: rollout"
            )
        if is_sampled and self.cache:
            raise ConfigError(
                "objective.cache: true given, but the responses are sampled during training, so no reference can be asked"
                " about them before it. Remove it"
            )
        if is_sampled:
            check_samples_as_trained(model)
        is_corrected = not isinstance(self.old_policy, OfModel) or self._importance_sampling is not None
        if not batch.samples_all and not is_corrected:
            raise ConfigError(
                "objective.old_policy: model given, but data.top_k, top_p, min_p or repetition_penalty has responses sampled"
                f" from another distribution than that of the model. Set objective.{_SAMPLING}, which corrects for it, or"
                " old_policy: rollout"
            )

    @property
    def needs_reference(self) -> bool:
        return isinstance(self.old_policy, OfReference) or self.kl is not None

    def reference_logps(self, model: LanguageModel, batch: GroupBatch) -> NamedArray:
        """{batch, group, position}: of each token."""
        of_tokens, tokens = (
            token_logps(model, batch.sequences(), temperature=batch.temperature)[0],
            batch.responses.tokens,
        )
        return of_tokens.unflatten_axis(BATCH, (tokens.resolve_axis(BATCH), tokens.resolve_axis(GROUP)))

    @property
    def facts_alone(self) -> ObjectiveFacts:
        return ObjectiveFacts((GroupBatch,), sequences_axis=GROUP, compares_examples=self.top_entropy < 1)

    def weights(self, batch: GroupBatch) -> dict[str, jax.Array]:
        """The denominators of the loss, the KL divergence and the entropy, and the number of tokens that are not padding."""
        masks = (batch.responses.loss_mask, self._counted(batch))
        whole, counted = (mask.rearrange((..., POSITION)).array for mask in masks)
        denominator = self.loss_agg.denominator(whole, counted)
        kl = {"kl": denominator} if isinstance(self.kl, KlInLoss) else {}
        entropy = {"entropy": jnp.sum(counted)} if self.entropy.has_weight else {}
        return {"loss": denominator, **kl, **entropy, AUXILIARY: auxiliary_weight(batch.responses)}

    def prepare_batch(self, batch: GroupBatch, key: jax.Array | None) -> GroupBatch:
        lengths = _lengths(batch).rearrange(batch.rewards.axes)
        if isinstance(self.advantage, NormalizeThenSum):
            assert batch.reward_parts is not None, "see check"
            parts = batch.reward_parts.rearrange((..., GROUP, REWARD))
            rows = tuple(axis for axis in parts.axes if axis.name != REWARD)
            is_response = lengths.rearrange(rows).array > 0
            advantages = self.advantage.of_batch(parts.array, jnp.array(batch.reward_weights), is_response)
            return replace(batch, advantages=hax.named(advantages, rows))
        if not isinstance(self.advantage, OfBatch):
            return batch
        shaped = hax.named(self._shaped(batch.rewards.array, lengths.array), batch.rewards.axes)
        std = self.advantage.std(*(of.rearrange((..., GROUP)).array for of in (shaped, lengths > 0)))
        rows = tuple(axis for axis in batch.rewards.axes if axis.name != GROUP)
        return replace(batch, std_of_batch=hax.full(rows, std, dtype=jnp.float32))

    def init_statistics(self) -> dict[str, jax.Array]:
        return self.entropy.init()

    def update_statistics(self, statistics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return self.entropy.after(statistics)

    @property
    def _importance_sampling(self) -> ImportanceSampling | None:
        return self.old_policy.importance_sampling if isinstance(self.old_policy, OfModel) else None

    def _counted(self, batch: GroupBatch) -> NamedArray:
        """The loss mask, 0 for responses that are left out."""
        if not self.mask_truncated:
            return batch.responses.loss_mask
        assert batch.finished is not None, "see check"
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
        rewards_BG, lengths_BG = (of.rearrange((BATCH, GROUP)).array for of in (batch.rewards, _lengths(batch)))
        punished_BG = self._shaped(rewards_BG, lengths_BG)
        shaped_BG = punished_BG
        if isinstance(self.kl, KlInReward):
            # Over all tokens: a response that is left out of the loss still counts in the advantages of its group.
            kl_N = jnp.sum(self.kl.estimate(tokens, by_sequence(batch.responses.loss_mask)), axis=1)
            shaped_BG = punished_BG - self.kl.coef * kl_N.reshape(rewards_BG.shape)
        advantage_N = self._advantages(shaped_BG, batch).reshape(-1)
        ratio_NS = log_ratios(tokens.logps, tokens.old, tokens.mask, self.loss.importance)
        losses_NS = self._policy_losses(tokens, ratio_NS, advantage_N)
        weights, weight_NS = self.weights(batch), self.loss_agg.token_weights(tokens.mask)
        num_tokens = jnp.sum(tokens.mask)
        loss = Sum(jnp.sum(jnp.where(tokens.mask > 0, losses_NS * weight_NS, 0.0)), weights["loss"])
        minimized = {"loss": loss}
        metrics = {
            "loss": loss,
            "entropy": Sum(jnp.sum(tokens.entropy * tokens.mask), num_tokens),
            **reward_metrics(rewards_BG, shaped_BG, batch, self.advantage.std_ddof),
            **clip_metrics(self.loss, tokens, ratio_NS, advantage_N),
            **sampler_metrics(tokens),
        }
        if self.entropy.has_weight:
            total, count = jnp.sum(tokens.entropy * tokens.counted), jnp.sum(tokens.counted)
            adapts = self.entropy.adaptive is not None
            coefficient: Any = coefficient_of(slot.statistics) if adapts else self.entropy.coef
            # Its denominator counts all tokens, because which have large entropies is known only here.
            of_all = total * num_tokens / jnp.maximum(count, 1.0)
            minimized["entropy"] = Sum(-coefficient * of_all, weights["entropy"])
            if adapts:
                metrics["entropy_coef"] = Sum(coefficient * weights["entropy"], weights["entropy"])
                slot = replace(slot, statistics=with_entropies(slot.statistics, total, count))
        if isinstance(self.kl, KlInLoss):
            kl_NS = self.kl.estimate(tokens, ratio_NS)
            minimized["kl"] = Sum(self.kl.coef * jnp.sum(kl_NS * weight_NS), weights["kl"])
            metrics["kl"] = Sum(jnp.sum(kl_NS * tokens.mask), num_tokens)
        elif isinstance(self.kl, KlInReward):
            metrics["kl"] = Sum(jnp.sum(self.kl.estimate(tokens, tokens.mask)), num_tokens)
        if self.overlong is not None:
            penalty = jnp.sum((punished_BG - rewards_BG) * (lengths_BG > 0))
            metrics["overlong_penalty"] = Sum(penalty, metrics["reward"].weight)
        aux_terms, aux_metrics = auxiliary_terms(aux)
        return {**minimized, **aux_terms}, metrics | aux_metrics, slot

    def _tokens(
        self, model: LanguageModel, batch: GroupBatch, key: jax.Array | None
    ) -> tuple[ResponseTokens, Mapping[str, AuxLoss]]:
        entropy = ChunkLogits.entropy if self.entropy.has_weight else _constant_entropy
        sequences, temperature = batch.sequences(), batch.temperature
        logps, entropies, aux = token_logps(model, sequences, entropy, key=key, temperature=temperature)
        logps_NS, entropy_NS = (a.rearrange((BATCH, POSITION)).array for a in (logps, entropies))
        mask_NS = by_sequence(self._counted(batch))
        counted_NS = mask_NS
        if self.top_entropy < 1:
            counted_NS = mask_NS * most_uncertain(jax.lax.stop_gradient(entropy_NS), mask_NS, self.top_entropy)
        reference_NS = None if batch.annotations is None else by_sequence(batch.annotations.logps)
        sampler_NS = None if batch.sampler_logps is None else by_sequence(batch.sampler_logps)
        old = {OfReference: reference_NS, OfRollout: sampler_NS, OfModel: jax.lax.stop_gradient(logps_NS)}
        old_NS = old[type(self.old_policy)]
        assert old_NS is not None, "a reference has annotated the batch, or its sampler has recorded its probabilities"
        return ResponseTokens(logps_NS, entropy_NS, mask_NS, counted_NS, old_NS, reference_NS, sampler_NS), aux

    def _advantages(self, shaped_BG: jax.Array, batch: GroupBatch) -> jax.Array:
        if batch.advantages is not None:
            return batch.advantages.rearrange((BATCH, GROUP)).array
        assert isinstance(self.advantage, OfSum), "the others are in the batch"
        std_of_batch = None if batch.std_of_batch is None else jnp.max(batch.std_of_batch.array)
        return self.advantage.of(shaped_BG, std_of_batch)

    def _policy_losses(self, tokens: ResponseTokens, ratio_NS: jax.Array, advantage_N: jax.Array) -> jax.Array:
        sampling, corrected_NS = self._importance_sampling, 1.0
        if sampling is not None:
            assert tokens.sampler is not None, "see check"
            corrected_NS = sampling.weights(tokens.logps, tokens.sampler, tokens.mask)
            if self.loss.corrects_ratio:
                ratio_NS += jnp.clip(jnp.log(corrected_NS), SMALLEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
                corrected_NS = 1.0
        losses_NS = corrected_NS * self.loss.losses(tokens, ratio_NS, advantage_N)
        if self.off_policy_threshold is not None:
            losses_NS *= on_policy_weights(tokens, advantage_N, self.off_policy_threshold)
        return losses_NS if self.loss.is_of_responses else jnp.where(tokens.counted > 0, losses_NS, 0.0)

    def _shaped(self, rewards: jax.Array, lengths: jax.Array) -> jax.Array:
        """The rewards with what is subtracted from those of long responses. Args: lengths: in tokens."""
        return rewards if self.overlong is None else rewards + self.overlong.penalties(lengths)


def _constant_entropy(chunk: ChunkLogits) -> jax.Array:
    return chunk.constant().entropy()


def _lengths(batch: GroupBatch) -> NamedArray:
    """Tokens of each response, int32 {[microbatch,] batch, group}."""
    return hax.sum((batch.responses.loss_mask > 0).astype(jnp.int32), POSITION)
