"""Multi-token prediction (MTP): one more layer predicts the token after the next one.

Source: DeepSeek-AI 2024, DeepSeek-V3 (arXiv:2412.19437), section 2.2, equations 21 to 25, with one layer. As in published
weights, the hidden state is that after the final norm, and the embedding comes first in the product with both.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import EMBED, LAYERS, MTP_INPUT
from jaxlm.core.sharding import for_compute
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.core.values.permutation import following
from jaxlm.models.base import Hidden, Inputs
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.base import Mixer
from jaxlm.models.moe import num_multiplied
from jaxlm.models.norms import Norm
from jaxlm.models.remat import parse_remat
from jaxlm.models.stacks import Block, LayerKind, Stack, stacked

MTP = "mtp"
"""Path of the layer in a model."""


class MtpLayer(eqx.Module):
    """Maps the embedding of the next token and the hidden state of a token to the hidden state for the token after both.

    Attributes:
        embed_norm, hidden_norm: applied to the two.
        proj: maps them, side by side, to the input of the layer.
        layers: one layer with attention, like the last one of the model's.
        final_norm: applied to its output.
    """

    embed_norm: Norm
    hidden_norm: Norm
    proj: Linear
    layers: hnn.Stacked
    final_norm: Norm

    def __call__(
        self, embedded: NamedArray, hidden: NamedArray, inputs: Inputs, config: Any, key: jax.Array | None
    ) -> Hidden:
        """Maps {batch, position, embed} to the same shape.

        Args:
            embedded: of the next token.
            hidden: of the token, after the final norm.
            inputs: of `inputs_of_following`.
            config: of the model.
        """
        embed_norm, hidden_norm, proj = for_compute((self.embed_norm, self.hidden_norm, self.proj))
        parts = [x.rename({EMBED: MTP_INPUT}) for x in (embed_norm(embedded), hidden_norm(hidden))]
        stack = Stack(
            self.layers,
            self.final_norm,
            kinds=(mtp_kind(config),),
            scan=config.scan_layers,
            remat_policy=parse_remat(config.gradient_checkpointing),
            attn_backend=config.attn_backend,
            mlp_tile_tokens=config.mlp_tile_tokens,
        )
        return stack(proj(hax.concatenate(MTP_INPUT, parts)), inputs, None, key)


def mtp_kind(config: Any) -> LayerKind:
    """The kind of the layer: that of the model's last layer with the same parameters."""
    kinds = config.rotated_kinds
    like = [kind for layer, kind in enumerate(kinds) if config.layer_block(layer) == config.block]
    return (like or kinds)[-1]


def initial_mtp(config: Any, *, key: jax.Array) -> MtpLayer:
    """Initializes the layer of a config with `block`, which it calls for a layer with attention."""
    k_proj, k_layer = jax.random.split(key)
    Both = Axis(MTP_INPUT, 2 * config.hidden_dim)
    proj = Linear.init(Both, config.Embed, std=config.initializer_range, key=k_proj)
    init: Callable[..., Block] = config.block
    layers = stacked(init, Axis(LAYERS, 1), jax.random.split(k_layer, 1))
    return MtpLayer(config.norm(), config.norm(), proj, layers, config.norm())


def with_mtp(flops: FlopsPerToken, config: Any, vocab_size: int) -> FlopsPerToken:
    """FLOPs with those of the layer, and of the head for it."""
    layer = jax.eval_shape(lambda: initial_mtp(config, key=jax.random.key(0)))
    more = FlopsPerToken.of(
        weights=num_multiplied(layer, layer) + vocab_size * config.hidden_dim,
        mixers=[mixer.work(mtp_kind(config).window) for mixer in tree.modules(layer, Mixer)],
        seq_len=config.seq_len,
    )
    return FlopsPerToken(flops.causal + more.causal, flops.palm + more.palm)


def inputs_of_following(inputs: Inputs) -> Inputs:
    """What the layer reads at each token: the next one. The last token of a document has none, and becomes padding.

    Positions stay: attention depends only on their differences.
    """
    segment_ids = _with_following(inputs.segment_ids, inputs.order)
    return Inputs(following(inputs.tokens, inputs.order), inputs.positions, segment_ids, order=inputs.order)


def targets_of_following(batch: TokenBatch) -> tuple[NamedArray, NamedArray]:
    """The token after the next one, int {.., position}, and its weight in the loss, float32: that which it has as the next
    token of the next one, if that is in the same document."""
    has_next = _with_following(batch.segment_ids, batch.order) != 0
    mask = hax.where(has_next, following(batch.loss_mask, batch.order), 0.0)
    return following(batch.targets, batch.order), mask


def _with_following(segment_ids: NamedArray, order: NamedArray | None) -> NamedArray:
    """The segment ids of tokens that another token of the same document follows; 0 for others."""
    after = following(segment_ids, order)
    return NamedArray(segment_ids.array * (segment_ids.array == after.array), segment_ids.axes)
