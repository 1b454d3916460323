"""Prediction of labels that the data gives."""

from typing import Any, ClassVar

import haliax as hax
import jax

from jaxlm.core.values.batch_types import LabeledBatch
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.loss import next_token_sums
from jaxlm.objectives.base import AUXILIARY, Metrics, ObjectiveConfig, ObjectiveFacts, auxiliary_terms, auxiliary_weight
from jaxlm.reading.choices import choice


@choice(ObjectiveConfig, "custom")
class CustomTargets(ObjectiveConfig):
    """Mean cross-entropy of the labels in the data, each at its own token, for causal and for bidirectional models. Nothing
    is hidden or shifted here: see `data.type: labeled`.
    """

    facts: ClassVar[ObjectiveFacts] = ObjectiveFacts(
        batch_types=(LabeledBatch,),
        other_batches="Set data.type: labeled, whose records have a label for each token",
        head_in_fp8=False,
        reads_later_tokens=None,
        inputs_repeat=True,
    )

    def weights(self, batch: LabeledBatch) -> dict[str, jax.Array]:
        """The number of tokens with a label, and of those that are not padding."""
        return {"loss": hax.sum(batch.loss_mask).scalar(), AUXILIARY: auxiliary_weight(batch)}

    def terms(
        self, model: LanguageModel, batch: LabeledBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss term `loss` and the layers' auxiliary losses. The metrics are `loss` and `mean_token_accuracy`."""
        hidden = model.hidden(Inputs.of(batch), key=key)
        options = model.traits.loss_options
        sums = next_token_sums(hidden.final, model.lm_head(), batch.targets, batch.loss_mask, **options)
        weight = self.weights(batch)["loss"]
        terms, metrics = auxiliary_terms(hidden.aux)
        metrics |= {"loss": Sum(sums.cross_entropy, weight), "mean_token_accuracy": Sum(sums.correct, weight)}
        return {"loss": Sum(sums.total, weight), **terms}, metrics, slot
