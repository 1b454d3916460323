"""The loss of hidden tokens, which masked and diffusion language models share."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import haliax as hax
import jax
from haliax import NamedArray

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import MaskedBatch
from jaxlm.core.values.mask_schedule import WITHOUT_BOUND
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.loss import next_token_sums
from jaxlm.objectives.base import AUXILIARY, Metrics, ObjectiveConfig, auxiliary_terms, auxiliary_weight
from jaxlm.reading.decode import choice_name


class HiddenTokens(ObjectiveConfig):
    """An objective that predicts hidden tokens, at their own positions."""

    batch_types: ClassVar[tuple[type, ...]] = (MaskedBatch,)
    other_batches: ClassVar[str] = (
        "Set data.masking (of data.type: tokens), which hides tokens ({} hides a random fraction of each sequence)"
    )
    head_in_fp8: ClassVar[bool] = False
    reads_later_tokens: ClassVar[bool | None] = True

    @property
    def inputs_key(self) -> Mapping[str, Any] | None:
        return {}


class DiffusionBound(HiddenTokens):
    """An objective that is the bound of masked diffusion."""

    def check_columns(self, columns: Collection[str], model: LanguageModel) -> None:
        if "rates" not in columns:
            raise ConfigError(
                f"objective.type: {choice_name(type(self))} is a bound only for masks that hide each token with the same"
                " probability, from none at time 0 to all at time 1. Set objective.type: mlm, or remove from data.masking"
                f" {WITHOUT_BOUND}. times: [first, last] trains on a part of the bound"
            )

    def weights(self, batch: MaskedBatch) -> dict[str, jax.Array]:
        """The number of tokens that may be hidden, and of those that are not padding."""
        return hidden_token_weights(batch, batch.counted)


def hidden_token_weights(batch: MaskedBatch, counted: NamedArray) -> dict[str, jax.Array]:
    """The denominators. Args: counted: float32, 1 for the tokens that the loss is divided by."""
    return {"loss": hax.sum(counted).scalar(), AUXILIARY: auxiliary_weight(batch)}


def hidden_token_terms(
    model: LanguageModel,
    batch: MaskedBatch,
    weights: NamedArray,
    counted: NamedArray,
    excluded: NamedArray | None,
    key: jax.Array | None,
) -> tuple[dict[str, Sum], Metrics]:
    """The loss term and those of the layers, and the metrics `loss`, `mean_token_accuracy` and `hidden_share`.

    Args:
        weights: float32 {batch, position}, the weight of each token's loss; 0 where it is not hidden.
        counted: float32, 1 for the tokens that the sum is divided by.
        excluded: a token at each position that has no probability; None for none.
    """
    hidden = model.hidden(Inputs.of(batch), key=key)
    options: dict[str, Any] = {"soft_cap": model.logit_soft_cap, "vocab_multiple": model.vocab_multiple}
    sums = next_token_sums(hidden.final, model.lm_head(), batch.targets, weights, excluded=excluded, **options)
    weight = hidden_token_weights(batch, counted)["loss"]
    terms, metrics = auxiliary_terms(hidden.aux)
    metrics |= {"loss": Sum(sums.cross_entropy, weight), "mean_token_accuracy": Sum(sums.correct, weight)}
    metrics["hidden_share"] = Sum(hax.sum(batch.loss_mask).scalar(), hax.sum(batch.maskable).scalar())
    return {"loss": Sum(sums.total, weight), **terms}, metrics
