"""What the attention of every layer adds to the residual stream, computed once more from the layers' inputs."""

from collections.abc import Iterator
from typing import TypeVar

import equinox as eqx
import jax
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, EMBED, LAYERS, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import for_compute
from jaxlm.models.attention.api import AttentionMask
from jaxlm.models.base import EMBEDDING, Hidden, Inputs, LanguageModel, layer_tap
from jaxlm.models.decoder import Decoder, DecoderBlock
from jaxlm.models.layers import Attention
from jaxlm.models.norms import Norm
from jaxlm.models.stacks import Body, layer_contexts

T = TypeVar("T")


def num_attention_layers(model: LanguageModel, key: str) -> int:
    """The number of layers. Args: key: for messages.

    Raises:
        ConfigError: it is not known what their attention computes.
    """
    if isinstance(model, Decoder):
        body: Body = model.body
        if all(isinstance(stack.layers.stacked, DecoderBlock) for stack in body.stacks):
            return body.num_layers
    raise ConfigError(
        f"{key}: it is not known what the attention of each layer computes in a model of type {type(model).__name__}. Set it"
        " to null"
    )


def with_attention_outputs(model: LanguageModel, inputs: Inputs) -> tuple[Hidden, list[NamedArray]]:
    """The model's output, and the output of each layer's attention {batch, position, embed}, before a norm or a factor that
    may follow. Traceable. Args: model: one that `num_attention_layers` accepts.
    """
    assert isinstance(model, Decoder)
    body: Body = model.body
    taps = (EMBEDDING, *map(layer_tap, range(body.num_layers - 1)))
    hidden = model.hidden(inputs, taps=taps)
    first, mask = body.stacks[0], AttentionMask.of(inputs)
    contexts = layer_contexts(body.kinds_by_layer, inputs, mask, first.attn_backend, first.HeadSize)
    outputs = []
    for tap, (norm, attention), context in zip(taps, _attentions(body), contexts, strict=True):
        x = hidden.taps[tap]
        output, _ = attention(x if norm is None else norm(x), context, None)
        outputs.append(output.rearrange((BATCH, POSITION, EMBED)))
    return hidden, outputs


def _attentions(body: Body) -> Iterator[tuple[Norm | None, Attention]]:
    """The attention of every layer and the norm before it, from the first layer to the last."""
    places = [0] * len(body.stacks)
    for number in body.order:
        block: DecoderBlock = body.stacks[number].layers.stacked
        yield for_compute(_of_layer((block.attn_norm, block.attn), places[number]))
        places[number] += 1


def _of_layer(stacked: T, place: int) -> T:
    def at(leaf):
        if not tree.is_named(leaf):
            return leaf[place] if eqx.is_array(leaf) else leaf
        return leaf[LAYERS, place] if leaf.has_axis(LAYERS) else leaf

    return jax.tree.map(at, stacked, is_leaf=tree.is_named)
