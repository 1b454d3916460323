"""Next-token prediction, for pretraining, and with a loss mask for instruction tuning.

Source: negative log-likelihood of each token given those before it (Radford et al. 2018, "Improving Language
Understanding by Generative Pre-Training", equation 1); z-loss, label smoothing and DFT as in `jaxlm.models.loss`;
NEFTune as in `jaxlm.models.layers.token_embeddings`.
"""

from typing import Any, ClassVar

import haliax as hax
import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import BelowOne, NonNegativeFloat
from jaxlm.core.rules import Rules, excludes
from jaxlm.core.values.batch_types import LabeledBatch, MaskedBatch, PairBatch, TokenBatch
from jaxlm.core.values.sums import Sum, TokenScores
from jaxlm.models.base import EmbeddingNoise, Inputs, LanguageModel
from jaxlm.models.loss import next_token_sums, token_losses
from jaxlm.objectives.base import AUXILIARY, Metrics, ObjectiveConfig, ObjectiveFacts, auxiliary_terms, auxiliary_weight
from jaxlm.reading.choices import choice


@choice(ObjectiveConfig, "next_token")
class NextToken(ObjectiveConfig):
    """Cross-entropy of the next token, on the tokens selected by the loss mask. Of pairs, it trains on the chosen completion.

    Attributes:
        z_loss_weight: weight z of the z-loss `z * logsumexp(logits)**2`, which keeps the logits from drifting; 0 disables it.
        label_smoothing: fraction of the target distribution that is spread evenly over the vocabulary; 0 disables it.
        dft: dynamic fine-tuning: multiply the loss of each token by the token's probability, as a constant. A model that
            starts from random weights gives every token a probability near 0, and learns next to nothing.
        neftune_alpha: NEFTune: in training, add uniform noise to the token embeddings, of the size `alpha / sqrt(L d)` for a
            document of L tokens and d features; 5, 10 and 15 are common. 0 adds none.
        log_entropy: log the mean entropy of the predictions as `train/entropy`.
    """

    z_loss_weight: NonNegativeFloat = 0.0
    label_smoothing: BelowOne = 0.0
    dft: bool = False
    neftune_alpha: NonNegativeFloat = 0.0
    log_entropy: bool = False

    key_rules: ClassVar[Rules] = (
        excludes("dft", "label_smoothing", why="but both change the weight of the likelihood"),
    )

    @property
    def facts(self) -> ObjectiveFacts:
        return ObjectiveFacts(batch_types=(TokenBatch, PairBatch), inputs_repeat=not self.neftune_alpha)

    def prepare_batch(self, batch: TokenBatch | PairBatch, key: jax.Array | None) -> TokenBatch | PairBatch:
        return batch.with_row_keys(key) if self.neftune_alpha and key is not None else batch

    def weights(self, batch: TokenBatch | PairBatch) -> dict[str, jax.Array]:
        """The number of tokens in the loss mask, and of those that are not padding."""
        batch = batch.supervised()
        return {"loss": hax.sum(batch.loss_mask).scalar(), AUXILIARY: auxiliary_weight(batch)}

    def terms(
        self, model: LanguageModel, batch: TokenBatch | PairBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss terms `loss` and the layers' auxiliary losses.

        The metrics are `loss` (plain cross-entropy in nats), `mean_token_accuracy`, `trained_share` (of the tokens that are
        not padding), `z_loss` and `entropy` if enabled, and those of the layers.
        """
        batch = batch.supervised()
        hidden = model.hidden(Inputs.of(batch, self._noise(model, batch)), key=key)
        sums = next_token_sums(
            hidden.final,
            model.lm_head(),
            batch.targets,
            batch.loss_mask,
            **model.traits.loss_options,
            fp8=model.traits.head_fp8,
            z_loss_weight=self.z_loss_weight,
            label_smoothing=self.label_smoothing,
            dft=self.dft,
            entropy=self.log_entropy,
        )
        weight = self.weights(batch)["loss"]
        metrics = {"loss": Sum(sums.cross_entropy, weight), "mean_token_accuracy": Sum(sums.correct, weight)}
        metrics["trained_share"] = Sum(weight, auxiliary_weight(batch))
        if self.z_loss_weight:
            metrics["z_loss"] = Sum(sums.z_loss, weight)
        if self.log_entropy:
            metrics["entropy"] = Sum(sums.entropy, weight)
        aux_terms, aux_metrics = auxiliary_terms(hidden.aux)
        return {"loss": Sum(sums.total, weight), **aux_terms}, metrics | aux_metrics, slot

    def _noise(self, model: LanguageModel, batch: TokenBatch) -> EmbeddingNoise | None:
        if not self.neftune_alpha or batch.row_keys is None:
            return None
        if not model.traits.adds_noise:
            raise ConfigError(
                f"objective.neftune_alpha: {self.neftune_alpha} given, but this model ({type(model).__name__}) does not add"
                " noise to its embeddings. Set it to 0, or pass traits=ModelTraits(adds_noise=True) to a model of your own"
                " that calls jaxlm.models.layers.token_embeddings"
            )
        return EmbeddingNoise(batch.row_keys, self.neftune_alpha)


ObjectiveConfig.register_subclass("clm")(NextToken)  # causal language modeling, as others call it


def score_batch(model: LanguageModel, batch: TokenBatch | PairBatch | MaskedBatch | LabeledBatch) -> TokenScores:
    """The negative log-likelihood of each target of a batch {batch, ...}, for evaluations.

    Of a batch with hidden tokens, these are weighted such that their mean is a bound: the loss of `diffusion`.

    Raises:
        ConfigError: the model reads the tokens that it would have to predict, or none of those after them.
    """
    batch = batch.supervised()
    if batch.reads_later_tokens == model.is_causal:
        raise ConfigError(
            "the loss of hidden tokens (data.masking) given, but tokens of this model attend only to earlier ones. Remove"
            " data.masking"
            if model.is_causal
            else "the loss of next tokens means nothing for a model whose tokens attend to later ones. Set data.masking to"
            " measure how well it predicts hidden ones"
        )
    hidden = model.hidden(Inputs.of(batch))
    losses = token_losses(
        hidden.final,
        model.lm_head(),
        batch.targets,
        **model.traits.loss_options,
        excluded=batch.excluded,
    )
    return batch.scores(losses)
