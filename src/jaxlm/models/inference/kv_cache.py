"""Creates and updates KV caches, and pads the prompts that fill them on the left.

Padding on the left lets all rows end at the same slot. Prompts are padded to one of few lengths, so that few shapes are
compiled. Padding has segment id 0, which nothing attends to.
"""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, CACHE_ROW, HEAD_SIZE, KEY_HEADS, KEY_POSITION, KV_HEADS, POSITION
from jaxlm.core.products.stored_weights import quantize
from jaxlm.core.sharding import current_layout
from jaxlm.models.attention.api import AttentionMask, as_keys
from jaxlm.models.base import Inputs, KVArray, KVCache, LanguageModel

_LENGTH_MULTIPLE = 64


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def program_rows(num_rows: int) -> int:
    """Rows of a program: a multiple of the devices that they are divided over."""
    layout = current_layout()
    return round_up(num_rows, 1 if layout is None else layout.num_shards(BATCH))


def padded_length(n: int) -> int:
    """Rounds up to one of few lengths: at least 64, and at most a quarter more than n beyond that."""
    return round_up(n, max(_LENGTH_MULTIPLE, 2 ** (n.bit_length() - 3)))


def left_padded(prompts: Sequence[Sequence[int]], rows: int, first: int = 0) -> Inputs:
    """Puts the prompts into the first of `rows` rows.

    Args:
        first: position of each prompt's first token in its document.
    """
    width = padded_length(max(map(len, prompts)))
    tokens, positions, segment_ids = (np.zeros((rows, width), np.int32) for _ in range(3))
    for row, prompt in enumerate(prompts):
        start = width - len(prompt)
        tokens[row, start:] = prompt
        positions[row, start:] = np.arange(first, first + len(prompt))
        segment_ids[row, start:] = 1
    axes = (Axis(BATCH, rows), Axis(POSITION, width))
    return Inputs(*(hax.named(jnp.asarray(a), axes) for a in (tokens, positions, segment_ids)))


class UnstackedCache(eqx.Module):
    """A `KVCache` with separate arrays per layer, in which batch and heads are one axis (`by_cache_row`).

    Attributes:
        keys, values: the layers of each stack.
        positions, segment_ids, length, tokens: as of a `KVCache`.
    """

    keys: tuple[tuple[KVArray, ...], ...]
    values: tuple[tuple[KVArray, ...], ...]
    positions: NamedArray
    segment_ids: NamedArray
    length: jax.Array
    tokens: NamedArray | None = None


def empty_cache(
    layers: Sequence[Axis],
    Batch: Axis,
    capacity: int,
    KVHeads: Axis,
    HeadSize: Axis,
    dtype,
    *,
    KeyHeads: Axis | None = None,
    KeySize: Axis | None = None,
    with_tokens: bool = False,
) -> KVCache:
    """Creates an empty cache with `capacity` slots per row.

    Args:
        layers: the axis of each stack.
        HeadSize: features of a value.
        KeyHeads: heads of keys; None means `KVHeads`.
        KeySize: features of a key; None means `HeadSize`.
        with_tokens: the cache holds the tokens too, for a model that reads earlier ones.
    """
    KeyPos = Axis(KEY_POSITION, capacity)

    def empty(Layers: Axis, Heads: Axis, Size: Axis) -> KVArray:
        values = hax.auto_sharded(hax.zeros((Layers, Batch, Heads, KeyPos, Size), dtype=dtype))
        scale = None
        if jnp.dtype(dtype) == jnp.int8:
            scale = hax.auto_sharded(hax.zeros((Layers, Batch, Heads, KeyPos), dtype=jnp.float32))
        return KVArray(values, scale)

    shapes = ((KeyHeads or KVHeads, KeySize or HeadSize), (KVHeads, HeadSize))
    keys, values = (tuple(empty(Layers, *shape) for Layers in layers) for shape in shapes)
    slots = hax.auto_sharded(hax.zeros((Batch, KeyPos), dtype=jnp.int32))
    tokens = slots if with_tokens else None
    return KVCache(keys, values, slots, slots, jnp.zeros((), jnp.int32), fresh=True, tokens=tokens)


def kv_bytes_per_token(model: LanguageModel, dtype: Any) -> int:
    """Bytes of the keys and values of one token in all layers, with the scales of int8 entries; 0 without a `KVCache`."""
    cache = jax.eval_shape(lambda model: model.init_cache(Axis(BATCH, 1), 1, dtype), model)
    arrays = jax.tree.leaves((cache.keys, cache.values)) if isinstance(cache, KVCache) else []
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def mask_over_cache(cache: KVCache | UnstackedCache, inputs: Inputs) -> AttentionMask:
    """The mask of new inputs whose keys are the cached slots followed by the inputs themselves."""

    def concatenated(slots: NamedArray, new: NamedArray) -> NamedArray:
        arrays = [a.rearrange((BATCH, KEY_POSITION)).array for a in (slots, as_keys(new))]
        joined = jnp.concatenate(arrays, axis=1)
        return NamedArray(joined, (slots.resolve_axis(BATCH), Axis(KEY_POSITION, joined.shape[1])))

    positions, segment_ids = inputs.positions, inputs.segment_ids
    key_positions = concatenated(cache.positions, positions)
    return AttentionMask(positions, segment_ids, key_positions, concatenated(cache.segment_ids, segment_ids))


def extend_cache(cache: KVCache, inputs: Inputs, keys: Sequence[NamedArray], values: Sequence[NamedArray]) -> KVCache:
    """Writes the inputs' keys and values, {layers, batch, position, kv_heads, head_size} per stack, to the cache. Keys may
    have `key_heads` instead."""

    start = _next_slot(cache)

    def written(kv_arrays: Sequence[KVArray], new: Sequence[NamedArray]) -> tuple[KVArray, ...]:
        return tuple(write_kv_array(kv_array, one, start) for kv_array, one in zip(kv_arrays, new, strict=True))

    return KVCache(written(cache.keys, keys), written(cache.values, values), **extend_slots(cache, inputs))


def extend_slots(cache: KVCache | UnstackedCache, inputs: Inputs) -> dict[str, Any]:
    """Positions, segment ids, tokens and length of the cache after the inputs are added."""
    tokens, start = cache.tokens, _next_slot(cache)
    return {
        "positions": _update_slots(cache.positions, as_keys(inputs.positions), start),
        "segment_ids": _update_slots(cache.segment_ids, as_keys(inputs.segment_ids), start),
        "length": cache.length + inputs.tokens.axis_size(POSITION),
        "tokens": None if tokens is None else _update_slots(tokens, as_keys(inputs.tokens), start),
    }


def _next_slot(cache: KVCache | UnstackedCache) -> jax.Array | None:
    """The first empty slot; None if all are, which is known when the program is traced."""
    return None if isinstance(cache, KVCache) and cache.fresh else cache.length


def write_kv_array(kv_array: KVArray, new: NamedArray, start: jax.Array | None) -> KVArray:
    """Writes {batch, position, kv_heads, head_size}, optionally with `layers`, from slot `start` on, or to an
    empty cache. Keys may have `key_heads` instead."""
    new = as_keys(new).rearrange((..., BATCH, _heads(new), KEY_POSITION, HEAD_SIZE))
    new = new if kv_array.values.has_axis(BATCH) else by_cache_row(new)
    if kv_array.scale is None:
        return KVArray(_update_slots(kv_array.values, new, start))
    values, scale = quantize(new, HEAD_SIZE)
    return KVArray(_update_slots(kv_array.values, values, start), _update_slots(kv_array.scale, scale, start))


def by_cache_row(x: NamedArray) -> NamedArray:
    """Flattens {.., batch, kv_heads or key_heads, ..} to {.., cache_row, ..}; drops the axis if its size is 1.

    With an axis of size 1, XLA would reshape the array before reading it, which copies it.
    """
    flat = x.flatten_axes((BATCH, _heads(x)), CACHE_ROW)
    return flat[CACHE_ROW, 0] if flat.axis_size(CACHE_ROW) == 1 else flat


def _heads(x: NamedArray) -> str:
    return KEY_HEADS if x.has_axis(KEY_HEADS) else KV_HEADS


def _update_slots(slots: NamedArray, new: NamedArray, start: jax.Array | None) -> NamedArray:
    """Writes to {..., key_position, ...} from slot `start` on, or to empty slots."""
    names = [axis.name for axis in slots.axes]
    array, dim = new.rearrange(names).array.astype(slots.dtype), names.index(KEY_POSITION)
    if start is None:
        # Not a write at an index: for that, the partitioner gathers slots that are sharded.
        widths = [(0, 0)] * array.ndim
        widths[dim] = (0, slots.array.shape[dim] - array.shape[dim])
        return hax.auto_sharded(NamedArray(jnp.pad(array, widths), slots.axes))
    return NamedArray(jax.lax.dynamic_update_slice_in_dim(slots.array, array, start, dim), slots.axes)
