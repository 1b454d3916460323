"""Masked language modeling.

Source: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers" (arXiv:1810.04805), section 3.1.
"""

from typing import Any

import jax

from jaxlm.core.values.batch_types import MaskedBatch
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import LanguageModel
from jaxlm.objectives.base import Metrics, ObjectiveConfig
from jaxlm.objectives.hidden_tokens import HiddenTokens, hidden_token_terms, hidden_token_weights
from jaxlm.reading.choices import choice


@choice(ObjectiveConfig, "mlm")
class MaskedLanguageModeling(HiddenTokens):
    """Mean cross-entropy of the tokens that `data.masking` hides, which the model predicts from those on both sides. For a
    model that generates text, take `diffusion`.
    """

    def weights(self, batch: MaskedBatch) -> dict[str, jax.Array]:
        """The number of hidden tokens, and of those that are not padding."""
        return hidden_token_weights(batch, batch.loss_mask)

    def terms(
        self, model: LanguageModel, batch: MaskedBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss term `loss`, in nats for each hidden token, and the layers' auxiliary losses.

        The metrics are those of `hidden_token_terms`.
        """
        return *hidden_token_terms(model, batch, batch.loss_mask, batch.loss_mask, None, key), slot
