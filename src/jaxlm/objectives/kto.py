"""Kahneman-Tversky optimization: desirable completions become more likely, others less, without pairs.

Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv:2402.01306), equations 8
and 9; without a KL divergence: D'Oosterlinck et al. 2024 (arXiv:2408.06266), equation 7, for one completion at a time.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp

from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeFloat, PositiveFloat
from jaxlm.core.values.batch_types import UnpairedBatch
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import LanguageModel
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.step_flops import ModelInStep, trained_and_read
from jaxlm.objectives.base import AUXILIARY, Metrics, ObjectiveConfig, ObjectiveFacts, auxiliary_terms, auxiliary_weight
from jaxlm.objectives.completions import HeldReference, ReferencedObjective, completion_logps
from jaxlm.reading.choices import choice

_KIND = "kind"  # axis of the completions (0) and of those of other records (1)
_KL, _TOTAL, _COUNT = "kl", "log_ratios", "sequences"  # statistics: in use, and of the batch so far


def kto_losses(rewards: jax.Array, labels: jax.Array, kl: jax.Array, desirable: float, undesirable: float) -> jax.Array:
    """The loss of each completion, float32 [completions].

    Args:
        rewards: beta times the log-ratio to the reference.
        labels: 1 for desirable completions.
        kl: beta times the KL divergence from the reference, which has no gradient.
    """
    gains, losses = 1 - jax.nn.sigmoid(rewards - kl), 1 - jax.nn.sigmoid(kl - rewards)
    return jnp.where(labels > 0, desirable * gains, undesirable * losses)


@choice(ObjectiveConfig, "kto")
class Kto(ReferencedObjective):
    """Completions with a label (`data.type: unpaired`): the loss is averaged over completions.

    The KL divergence from the reference is estimated from prompts with completions of other records. It is that of the batch
    before, so that it is the mean over a whole batch, however that is split; before the first update it is 0.

    Attributes:
        beta: how closely the model stays to the reference.
        estimate_kl: false takes 0 for the KL divergence, and reads no completions of other records: TRL's
            `apo_zero_unpaired`.
        desirable_weight, undesirable_weight: weights of the two kinds of completions. With more of one kind, give the other
            a larger weight.
    """

    beta: PositiveFloat = 0.1
    estimate_kl: bool = True
    desirable_weight: NonNegativeFloat = 1.0
    undesirable_weight: NonNegativeFloat = 1.0

    def __post_init__(self):
        if self.reference == "none":
            raise ConfigError("objective.reference: none given, but the loss needs a reference. Remove it")
        self.check_reference()

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def facts_alone(self) -> ObjectiveFacts:
        flops = _with_mismatched if self.estimate_kl else trained_and_read
        return ObjectiveFacts((UnpairedBatch,), annotation_key={"estimate_kl": self.estimate_kl}, flops=flops)

    def init_statistics(self) -> dict[str, jax.Array]:
        names = (_KL, _TOTAL, _COUNT) if self.estimate_kl else ()
        return {name: jnp.zeros((), jnp.float32) for name in names}

    def update_statistics(self, statistics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if not statistics:
            return statistics
        kl = jnp.maximum(statistics[_TOTAL] / jnp.maximum(statistics[_COUNT], 1.0), 0.0)
        # The loss and its gradient do not show a value that is not finite here, and no later step would be without it.
        return {**self.init_statistics(), _KL: jnp.where(jnp.isfinite(kl), kl, statistics[_KL])}

    def reference_logps(self, model: LanguageModel, batch: UnpairedBatch) -> hax.NamedArray:
        """{batch, kind}: of the completions, and of those of other records."""
        sequences = (batch.completions, batch.mismatched) if self.estimate_kl else (batch.completions,)
        logps = [completion_logps(model, tokens)[0] for tokens in sequences]
        return hax.stack(hax.Axis(_KIND, len(sequences)), logps).rearrange((BATCH, _KIND))

    def weights(self, batch: UnpairedBatch) -> dict[str, jax.Array]:
        """The number of completions, and of tokens that are not padding."""
        num_completions = hax.sum(_has_targets(batch)).scalar().astype(jnp.float32)
        return {"loss": num_completions, AUXILIARY: auxiliary_weight(batch.completions)}

    def terms(
        self, model: LanguageModel, batch: UnpairedBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss terms `loss` and the layers' auxiliary losses.

        The metrics have TRL's names: `rewards/chosen` and `rewards/rejected` (of desirable and of other completions),
        `logps/chosen`, `logps/rejected`, and `kl`, which the loss has subtracted.
        """
        logps, aux = completion_logps(model, batch.completions, key=key)
        ratios = logps - batch.annotations.logps[_KIND, 0]
        labels, counted = batch.labels.array, _has_targets(batch).array.astype(jnp.float32)
        kl = jnp.zeros((), jnp.float32)
        if self.estimate_kl:
            kl, slot = slot.statistics[_KL], self._with_estimate(model, batch, slot)
        rewards = self.beta * ratios.array
        losses = kto_losses(rewards, labels, self.beta * kl, self.desirable_weight, self.undesirable_weight)
        loss = Sum(jnp.sum(losses * counted), self.weights(batch)["loss"])
        metrics = {"loss": loss}
        if self.estimate_kl:
            metrics["kl"] = Sum(kl * loss.weight, loss.weight)
        for side, is_side in (("chosen", labels), ("rejected", 1 - labels)):
            weights = is_side * counted
            for name, column in (("rewards", rewards), ("logps", logps.array)):
                metrics[f"{name}/{side}"] = Sum(jnp.sum(column * weights), jnp.sum(weights))
        aux_terms, aux_metrics = auxiliary_terms(aux)
        return {"loss": loss, **aux_terms}, metrics | aux_metrics, slot

    def _with_estimate(self, model: LanguageModel, batch: UnpairedBatch, slot: HeldReference) -> HeldReference:
        """The state with the log-ratios of mismatched completions added."""
        logps, _ = completion_logps(jax.lax.stop_gradient(model), batch.mismatched)
        counted = _has_targets(batch).array
        ratios = jnp.where(counted, (logps - batch.annotations.logps[_KIND, 1]).array, 0.0)
        before = slot.statistics
        added = {
            _TOTAL: before[_TOTAL] + jax.lax.stop_gradient(jnp.sum(ratios)),
            _COUNT: before[_COUNT] + jnp.sum(counted, dtype=jnp.float32),
        }
        return replace(slot, statistics={**before, **added})


def _with_mismatched(model: ModelInStep, references: Sequence[ModelInStep]) -> FlopsPerToken:
    """Model and references also read a mismatched completion, without a backward pass."""
    return trained_and_read(model, (*references, model, *references))


def _has_targets(batch: UnpairedBatch) -> hax.NamedArray:
    """bool {[microbatch,] batch}: whether a completion has a token in the loss. Rows that fill up a batch have none."""
    return hax.any(batch.completions.loss_mask > 0, POSITION)
