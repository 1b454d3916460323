"""DiffusionBlocks: every block of layers is a denoiser by itself, for its own range of mask fractions.

    all layers      row -> embeddings -> layers 0 .. L - 1        -> final norm, head -> loss
    K blocks        row -> embeddings -> the block of its noise   -> final norm, head -> loss

Source: Shing et al. 2025, "DiffusionBlocks" (arXiv:2506.14202), section 3: blocks for ranges of noise that are equally
probable, each trained alone. In the paper, a step trains one block, drawn at random. Here, it trains all of them: the times
of a batch are spread evenly, so each block has the same number of rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, DENOISER, MICROBATCH
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.values.batch_types import MaskedBatch
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import LanguageModel
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.part import ModelPart
from jaxlm.models.stacks import Body
from jaxlm.models.step_flops import ModelInStep
from jaxlm.objectives.base import Metrics, ObjectiveConfig
from jaxlm.objectives.hidden_tokens import DiffusionBound, hidden_token_terms
from jaxlm.reading.choices import choice


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
    def num_denoisers(self) -> int:
        return self.num_blocks

    def flops_per_token(self, model: ModelInStep, references: Sequence[ModelInStep]) -> FlopsPerToken:
        """A K-th of those of the layers, and those of the head."""
        whole, every = model.trained(), [path for path, _ in tree.leaves(model.model)]
        layers = [path for path in every if path.startswith(f"{_body_path(model.model)}.")]
        attention, without_layers = model.flops_per_token(every), model.trained(layers)
        head = without_layers.causal - attention.causal
        return whole.plus(-head).share(1 / self.num_blocks).plus(head)

    def with_batch_statistics(self, batch: MaskedBatch) -> MaskedBatch:
        """The rows in the order of their mask fractions, {microbatch, denoiser, batch, ...}: every microbatch has the same
        number for each block."""
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
        assert len(model.denoisers) == self.num_blocks, "the phase begins with the surgery `denoisers`"
        total: dict[str, Any] = {}
        totals: dict[str, Any] = {}
        for number, denoiser in enumerate(model.denoisers):
            rows = jax.tree.map(lambda column, at=number: column[DENOISER, at], batch, is_leaf=tree.is_named)
            part = ModelPart.of(model, denoiser.first, denoiser.stop)
            terms, metrics = hidden_token_terms(part, rows, rows.weights, rows.counted, rows.excluded, key)
            total, totals = _added(total, terms), _added(totals, metrics)
            totals[f"block_loss/{number}"] = metrics["loss"]
        return total, totals, slot


def _added(sums: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    return {**sums, **{name: sums[name] + value if name in sums else value for name, value in others.items()}}


def _body_path(model: LanguageModel) -> str:
    (path, _), *_ = tree.modules_by_path(model, Body)
    return path
