"""Predicting the next token: pretraining, and instruction tuning with a mask.

Source: negative log-likelihood of each token given those before it (Radford et al. 2018, "Improving Language
Understanding by Generative Pre-Training", equation 1); z-loss and label smoothing as in `jaxlm.models.loss`.
"""

from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.types import Sum, TokenBatch
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.loss import next_token_sums
from jaxlm.objectives.base import AUXILIARY, Metrics, ObjectiveConfig, auxiliary_terms, auxiliary_weight


@ObjectiveConfig.register_subclass("next_token")
@dataclass(frozen=True)
class NextToken(ObjectiveConfig):
    """Cross-entropy of the next token, over the tokens that the loss mask counts.

    Attributes:
        z_loss_weight: z in `z * logsumexp(logits)**2`, which keeps the logits from drifting.
        label_smoothing: the share of the target distribution that is spread evenly over the vocabulary.
    """

    z_loss_weight: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self):
        if not self.z_loss_weight >= 0:
            raise ConfigError(f"objective.z_loss_weight: {self.z_loss_weight} given, 0 or more expected")
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"objective.label_smoothing: {self.label_smoothing} given, from 0 up to 1 expected")

    def weights(self, batch: TokenBatch) -> dict[str, jax.Array]:
        """The number of tokens that count, and of those that are no padding."""
        return {"loss": hax.sum(batch.loss_mask).scalar(), AUXILIARY: auxiliary_weight(batch)}

    def terms(
        self, model: LanguageModel, batch: TokenBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The terms `loss` and what the layers add; the metrics `loss` (plain cross-entropy in nats), `accuracy`, `z_loss`
        if it is on, and what the layers found."""
        hidden = model.hidden(Inputs(batch.tokens, batch.positions, batch.segment_ids), key=key)
        sums = next_token_sums(
            hidden.final,
            model.lm_head(),
            batch.targets,
            batch.loss_mask,
            soft_cap=model.logit_soft_cap,
            z_loss_weight=self.z_loss_weight,
            label_smoothing=self.label_smoothing,
        )
        weight = self.weights(batch)["loss"]
        metrics = {"loss": Sum(sums.cross_entropy, weight), "accuracy": Sum(sums.correct, weight)}
        if self.z_loss_weight:
            metrics["z_loss"] = Sum(sums.z_loss, weight)
        added, found = auxiliary_terms(hidden.aux)
        return {"loss": Sum(sums.total, weight), **added}, metrics | found, slot
