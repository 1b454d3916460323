"""Masked diffusion: a bound on the likelihood of a text, from predictions of hidden tokens.

Source: Sahoo et al. 2024, "Simple and Effective Masked Diffusion Language Models" (arXiv:2406.07524), equation 10, with its
substitution parameterization (section 3.2.3); Nie et al. 2025, "Large Language Diffusion Models" (arXiv:2502.09992),
equation 3.
"""

from typing import Any

import jax

from jaxlm.core.values.batch_types import MaskedBatch
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import LanguageModel
from jaxlm.objectives.base import Metrics, ObjectiveConfig
from jaxlm.objectives.hidden_tokens import DiffusionBound, hidden_token_terms
from jaxlm.reading.choices import choice


@choice(ObjectiveConfig, "diffusion")
class Diffusion(DiffusionBound):
    """Negative evidence lower bound of masked diffusion, in nats for each token that may be hidden: the loss of hidden tokens
    times the derivative of the logarithm of the mask fraction by the time (1/t for the linear schedule), averaged over times.
    It is an upper bound of the negative log-likelihood, so it can be compared with the loss of next tokens. Tokens that are
    not hidden are known, and the mask token has no probability.
    """

    def terms(
        self, model: LanguageModel, batch: MaskedBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss term `loss` and the layers' auxiliary losses.

        The metrics are those of `hidden_token_terms`, weighted like the loss: `mean_token_accuracy` is the mean over all mask
        fractions.
        """
        return *hidden_token_terms(model, batch, batch.weights, batch.counted, batch.excluded, key), slot
