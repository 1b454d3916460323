"""The embeddings of previous tokens, which nanochat's smear adds to those of their successors."""

from collections.abc import Callable

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, EMBED, KEY_POSITION, POSITION
from jaxlm.core.values.permutation import previous
from jaxlm.models.base import Inputs, KVCache
from jaxlm.models.inference.kv_cache import UnstackedCache


def previous_embeddings(
    x: NamedArray, inputs: Inputs, cache: KVCache | UnstackedCache | None, embedded: Callable[[NamedArray], NamedArray]
) -> NamedArray:
    """The embedding of the token before each token, {batch, position, embed}; 0 for the first token of a document.

    Args:
        x: embeddings of the inputs.
        cache: holds the tokens before the inputs.
        embedded: embeds tokens.
    """
    segments = inputs.segment_ids
    axes = (segments.resolve_axis(BATCH), segments.resolve_axis(POSITION), x.resolve_axis(EMBED))
    First = axes[1].resize(1)
    x, segments = x.rearrange(axes), segments.rearrange(axes[:2])
    if cache is None or cache.tokens is None:
        first, first_segment = 0, 0
    else:
        token, first_segment = (_slot_before(slots, cache.length, First) for slots in (cache.tokens, cache.segment_ids))
        first = embedded(token).rearrange((axes[0], First, axes[2]))
    before, before_segments = previous(x, inputs.order, first), previous(segments, inputs.order, first_segment)
    same = NamedArray((before_segments.array == segments.array) & (segments.array != 0), segments.axes)
    return hax.where(same, before, 0.0).rearrange(axes).astype(x.dtype)


def _slot_before(slots: NamedArray, length: jax.Array, First: Axis) -> NamedArray:
    """The last slot in use, {batch, position}; of an empty cache, its first slot, which has segment 0."""
    slots = slots.rearrange((BATCH, KEY_POSITION))
    array = jax.lax.dynamic_slice_in_dim(slots.array, jnp.maximum(length - 1, 0), 1, axis=1)
    return NamedArray(array, (slots.axes[0], First))
