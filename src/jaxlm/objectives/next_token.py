"""Next-token prediction, for pretraining, and with a loss mask for instruction tuning.

Source: negative log-likelihood of each token given those before it (Radford et al. 2018, "Improving Language
Understanding by Generative Pre-Training", equation 1); z-loss, label smoothing and DFT as in `jaxlm.models.loss`;
NEFTune as in `jaxlm.models.layers.token_embeddings`; multi-token prediction as in `jaxlm.models.decoders.mtp`.
"""

from typing import Any, ClassVar

import haliax as hax
import jax

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import BelowOne, NonNegativeFloat
from jaxlm.core.rules import Rules, excludes
from jaxlm.core.values.batch_types import LabeledBatch, MaskedBatch, PairBatch, TokenBatch
from jaxlm.core.values.sums import Sum, TokenScores
from jaxlm.models.base import EmbeddingNoise, Inputs, LanguageModel
from jaxlm.models.decoder import as_transformer
from jaxlm.models.decoders.mtp import MTP, MtpLayer, targets_of_following
from jaxlm.models.loss import next_token_sums, token_losses
from jaxlm.objectives.base import AUXILIARY, Metrics, ObjectiveConfig, ObjectiveFacts, auxiliary_terms, auxiliary_weight
from jaxlm.reading.choices import choice
from jaxlm.reading.decode import choice_name

_NO_MTP = "has no layer that predicts the token after the next one"


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
        mtp_weight: weight of the cross-entropy of the token after the next one, which the layer `model.mtp` predicts, by the
            loss mask of that token. DeepSeek-V3 has 0.3, and 0.1 at the end. 0 does not compute it. The keys above change
            only the loss of the next token.
    """

    z_loss_weight: NonNegativeFloat = 0.0
    label_smoothing: BelowOne = 0.0
    dft: bool = False
    neftune_alpha: NonNegativeFloat = 0.0
    log_entropy: bool = False
    mtp_weight: NonNegativeFloat = 0.0

    key_rules: ClassVar[Rules] = (
        excludes("dft", "label_smoothing", why="but both change the weight of the likelihood"),
    )

    @property
    def facts(self) -> ObjectiveFacts:
        return ObjectiveFacts(
            batch_types=(TokenBatch, PairBatch), inputs_repeat=not self.neftune_alpha, trains_mtp=self.mtp_weight > 0
        )

    def prepare_batch(self, batch: TokenBatch | PairBatch, key: jax.Array | None) -> TokenBatch | PairBatch:
        return batch.with_row_keys(key) if self.neftune_alpha and key is not None else batch

    def weights(self, batch: TokenBatch | PairBatch) -> dict[str, jax.Array]:
        """The number of tokens in the loss mask, of those after the next ones, and of those that are not padding."""
        batch = batch.supervised()
        mtp = {MTP: hax.sum(targets_of_following(batch)[1]).scalar()} if self.mtp_weight else {}
        return {"loss": hax.sum(batch.loss_mask).scalar(), **mtp, AUXILIARY: auxiliary_weight(batch)}

    def terms(
        self, model: LanguageModel, batch: TokenBatch | PairBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss terms `loss`, `mtp` if enabled, and the layers' auxiliary losses.

        The metrics are `loss` (plain cross-entropy in nats), `mean_token_accuracy`, `trained_share` (of the tokens that are
        not padding), `z_loss`, `entropy`, `mtp_loss` and `mtp_accuracy` if enabled, and those of the layers.
        """
        batch = batch.supervised()
        inputs = Inputs.of(batch, self._noise(model, batch))
        hidden = model.hidden(inputs, key=key)
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
        terms, aux = {"loss": Sum(sums.total, weight)}, hidden.aux
        if self.mtp_weight:
            key = None if key is None else jax.random.fold_in(key, 1)
            later = as_transformer(model, _NO_MTP).hidden_of_mtp(inputs, hidden.final, key=key)
            targets, mask = targets_of_following(batch)
            options = {**model.traits.loss_options, "fp8": model.traits.head_fp8}
            sums = next_token_sums(later.final, model.lm_head(), targets, mask, **options)
            weight = hax.sum(mask).scalar()
            terms[MTP] = Sum(self.mtp_weight * sums.total, weight)
            metrics |= {"mtp_loss": Sum(sums.cross_entropy, weight), "mtp_accuracy": Sum(sums.correct, weight)}
            aux = aux | {f"{MTP}_{name}": loss for name, loss in later.aux.items()}
        aux_terms, aux_metrics = auxiliary_terms(aux)
        return {**terms, **aux_terms}, metrics | aux_metrics, slot

    def check(self, batch: Any, model: LanguageModel, trainable: Any) -> None:
        if self.mtp_weight and not tree.modules(model, MtpLayer):
            raise ConfigError(
                f"objective.mtp_weight: {self.mtp_weight} given, but the model {_NO_MTP}. Set model.mtp: true (families that"
                " have it: qwen3_5, qwen3_next, glm4_moe, deepseek_v3 and their relatives), or remove it"
            )

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


def check_mtp(objective: ObjectiveConfig, trainable: Any) -> None:
    """Raises `ConfigError` if the layer `mtp` would only decay. Args: trainable: as of `ObjectiveConfig.check`."""
    if not objective.facts.trains_mtp and any(path.startswith(f"{MTP}.") for path, _ in tree.leaves(trainable)):
        raise ConfigError(
            f"model.mtp: true given, but objective.type: {choice_name(type(objective))} does not train this layer, so that it"
            " would only decay. Set objective.mtp_weight of next_token, exclude the layer (trainable: ['^(?!mtp)'], in the"
            " phase), or remove model.mtp"
        )


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
