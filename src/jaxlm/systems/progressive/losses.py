"""Losses of hidden tokens: masked language models, masked diffusion, and DiffusionBlocks.

Masked diffusion trains a bound on the likelihood of a text, from predictions of hidden tokens. In DiffusionBlocks, every
block of layers is a denoiser by itself, for its own range of mask fractions:

    all layers      row -> embeddings -> layers 0 .. L - 1        -> final norm, head -> loss
    K blocks        row -> embeddings -> the block of its noise   -> final norm, head -> loss

In the paper, a step trains one block, drawn at random. Here, it trains all of them: the times of a batch are spread evenly,
so each block has the same number of rows.

Source:
    Masked language models: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers" (arXiv:1810.04805),
    section 3.1.
    Masked diffusion: Sahoo et al. 2024, "Simple and Effective Masked Diffusion Language Models" (arXiv:2406.07524),
    equation 10, with its substitution parameterization (section 3.2.3); Nie et al. 2025, "Large Language Diffusion Models"
    (arXiv:2502.09992), equation 3.
    DiffusionBlocks: Shing et al. 2025, "DiffusionBlocks" (arXiv:2506.14202), section 3: blocks for ranges of noise that are
    equally probable, each trained alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, DENOISER, MICROBATCH
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.values.batch_types import MaskedBatch
from jaxlm.core.values.mask_schedule import WITHOUT_BOUND
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.loss import next_token_sums
from jaxlm.models.stacks import Body
from jaxlm.models.step_flops import ModelInStep
from jaxlm.objectives.base import AUXILIARY, Metrics, ObjectiveConfig, ObjectiveFacts, auxiliary_terms, auxiliary_weight
from jaxlm.plan.run_config import PhaseConfig
from jaxlm.reading.choices import choice
from jaxlm.reading.decode import choice_name
from jaxlm.systems.progressive.cached_trunk import ModelPart
from jaxlm.systems.progressive.surgery import DenoisersConfig

_FACTS = ObjectiveFacts(
    batch_types=(MaskedBatch,),
    other_batches="Set data.masking (of data.type: tokens), which hides tokens ({} hides a random fraction of each sequence)",
    head_in_fp8=False,
    reads_later_tokens=True,
    inputs_repeat=True,
)
"""Of an objective that predicts hidden tokens, at their own positions."""


class DiffusionBound(ObjectiveConfig):
    """An objective that is the bound of masked diffusion."""

    def check(self, batch: MaskedBatch, model: LanguageModel, trainable: Any) -> None:
        if batch.rates is None:
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
    options = model.traits.loss_options
    sums = next_token_sums(hidden.final, model.lm_head(), batch.targets, weights, excluded=excluded, **options)
    weight = hidden_token_weights(batch, counted)["loss"]
    terms, metrics = auxiliary_terms(hidden.aux)
    metrics |= {"loss": Sum(sums.cross_entropy, weight), "mean_token_accuracy": Sum(sums.correct, weight)}
    metrics["hidden_share"] = Sum(hax.sum(batch.loss_mask).scalar(), hax.sum(batch.maskable).scalar())
    return {"loss": Sum(sums.total, weight), **terms}, metrics


@choice(ObjectiveConfig, "mlm", role="hidden_tokens")
class MaskedLanguageModeling(ObjectiveConfig):
    """Mean cross-entropy of the tokens that `data.masking` hides, which the model predicts from those on both sides. For a
    model that generates text, take `diffusion`.
    """

    facts: ClassVar[ObjectiveFacts] = _FACTS

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


@choice(ObjectiveConfig, "diffusion")
class Diffusion(DiffusionBound):
    """Negative evidence lower bound of masked diffusion, in nats for each token that may be hidden: the loss of hidden tokens
    times the derivative of the logarithm of the mask fraction by the time (1/t for the linear schedule), averaged over times.
    It is an upper bound of the negative log-likelihood, so it can be compared with the loss of next tokens. Tokens that are
    not hidden are known, and the mask token has no probability.
    """

    facts: ClassVar[ObjectiveFacts] = _FACTS

    def terms(
        self, model: LanguageModel, batch: MaskedBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss term `loss` and the layers' auxiliary losses.

        The metrics are those of `hidden_token_terms`, weighted like the loss: `mean_token_accuracy` is the mean over all mask
        fractions.
        """
        return *hidden_token_terms(model, batch, batch.weights, batch.counted, batch.excluded, key), slot


@choice(ObjectiveConfig, "diffusion_blocks")
class DiffusionBlocks(DiffusionBound):
    """The bound of `diffusion` for a model of blocks: of all layers, only one block computes a text, the one for its mask
    fraction. Each block is for a range of mask fractions, the last one for the fewest hidden tokens. The ranges are equally
    probable, so every batch of `data.masking` has the same number of rows for each. A row costs a K-th of the layers, and a
    step keeps a K-th of their activations.

    From this phase on, evaluations and generation run single blocks too. Metrics: `block_loss/0` is the loss of the block
    with the fewest hidden tokens, `block_loss/1` that of the next one, and so on; `loss` is their mean over tokens.

    Attributes:
        num_blocks: number K of blocks: the stacks of a model that has grown, or else equal parts of the layers.
    """

    num_blocks: PositiveInt = 4

    @property
    def facts(self) -> ObjectiveFacts:
        return replace(_FACTS, num_shares=self.num_blocks, flops=self._flops)

    def prepare(self, phase: PhaseConfig) -> PhaseConfig:
        """The phase, which begins with a surgery that makes the blocks. Batches must have equal shares for them."""
        assert phase.data is not None
        masking = phase.data.batching.masking
        try:
            if masking is None:
                raise ConfigError("the data hides no tokens. Set data.masking: {} (data.type: tokens)")
            blocks = DenoisersConfig(masking.ranges(self.num_blocks), "blocks")
        except ConfigError as error:
            raise ConfigError(
                f"phase '{phase.name}': objective.type: {choice_name(type(self))} trains {self.num_blocks} blocks of layers"
                f" on equal shares of each batch, by the time, but {error}"
            ) from error
        return replace(phase, surgery=[*phase.surgery, blocks])

    def _flops(self, model: ModelInStep, references: Sequence[ModelInStep]) -> FlopsPerToken:
        """A K-th of those of the layers, and those of the head."""
        whole, every = model.trained(), [path for path, _ in tree.leaves(model.model)]
        (body, _), *_ = tree.modules_by_path(model.model, Body)
        layers = [path for path in every if path.startswith(f"{body}.")]
        attention, without_layers = model.flops_per_token(every), model.trained(layers)
        head = without_layers.causal - attention.causal
        return whole.plus(-head).share(1 / self.num_blocks).plus(head)

    def prepare_batch(self, batch: MaskedBatch, key: jax.Array | None) -> MaskedBatch:
        """The rows in the order of their mask fractions, {microbatch, denoiser, batch, ...}: every microbatch has the same
        number for each block. In evaluations, all layers compute every row."""
        if not batch.mask_fractions.has_axis(MICROBATCH):
            return batch
        Microbatch, Batch = (batch.mask_fractions.resolve_axis(name) for name in (MICROBATCH, BATCH))
        Block, Rows = Axis(DENOISER, self.num_blocks), Batch.resize(Batch.size // self.num_blocks)
        fractions = batch.mask_fractions.rearrange((Microbatch, Batch)).array
        order = jnp.argsort(fractions.reshape(-1)).reshape(Block.size, Microbatch.size, Rows.size).swapaxes(0, 1)

        def arranged(column: NamedArray) -> NamedArray:
            column = column.rearrange((Microbatch, Batch, ...))
            rows = column.array.reshape(-1, *column.array.shape[2:])
            return hax.auto_sharded(NamedArray(rows[order], (Microbatch, Block, Rows, *column.axes[2:])))

        return jax.tree.map(arranged, batch, is_leaf=tree.is_named)

    def terms(
        self, model: LanguageModel, batch: MaskedBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss term `loss`. A batch that is not arranged, as in evaluations, runs every block that a row needs for all
        rows."""
        if DENOISER not in [axis.name for axis in batch.tokens.axes]:
            return *hidden_token_terms(model, batch, batch.weights, batch.counted, batch.excluded, key), slot
        assert len(model.traits.denoisers) == self.num_blocks, "the phase begins with the surgery `denoisers`"
        total: dict[str, Any] = {}
        totals: dict[str, Any] = {}
        for number, denoiser in enumerate(model.traits.denoisers):
            rows = jax.tree.map(lambda column, at=number: column[DENOISER, at], batch, is_leaf=tree.is_named)
            part = ModelPart.of(model, denoiser.first, denoiser.stop)
            terms, metrics = hidden_token_terms(part, rows, rows.weights, rows.counted, rows.excluded, key)
            total, totals = _added(total, terms), _added(totals, metrics)
            totals[f"block_loss/{number}"] = metrics["loss"]
        return total, totals, slot


def _added(sums: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    return {**sums, **{name: sums[name] + value if name in sums else value for name, value in others.items()}}
