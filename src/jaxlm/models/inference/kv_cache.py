"""The key/value cache: making one, and writing to it."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, CACHE_ROW, HEAD_SIZE, KEY_POSITION, KV_HEADS, POSITION
from jaxlm.models.attention.api import AttentionMask, as_keys
from jaxlm.models.base import Inputs, KVArray, KVCache

_LARGEST = 127.0  # of int8, the same on both sides of zero


class UnstackedCache(eqx.Module):
    """A `KVCache` with a column for each layer, whose rows and heads are one axis (`by_cache_row`)."""

    keys: tuple[KVArray, ...]
    values: tuple[KVArray, ...]
    positions: NamedArray
    segment_ids: NamedArray
    length: jax.Array


def empty_cache(Layers: Axis, Batch: Axis, capacity: int, KVHeads: Axis, HeadSize: Axis, dtype) -> KVCache:
    """A cache of `capacity` slots a row, all of them empty."""
    KeyPos = Axis(KEY_POSITION, capacity)
    numbers = hax.auto_sharded(hax.zeros((Layers, Batch, KVHeads, KeyPos, HeadSize), dtype=dtype))
    scale = None
    if jnp.dtype(dtype) == jnp.int8:
        scale = hax.auto_sharded(hax.zeros((Layers, Batch, KVHeads, KeyPos), dtype=jnp.float32))
    column = KVArray(numbers, scale)
    slots = hax.auto_sharded(hax.zeros((Batch, KeyPos), dtype=jnp.int32))
    return KVCache(column, column, slots, slots, jnp.zeros((), jnp.int32), fresh=True)


def mask_with(cache: KVCache | UnstackedCache, inputs: Inputs) -> AttentionMask:
    """What the inputs see: the slots of the cache, and after them each other."""

    def both(slots: NamedArray, new: NamedArray) -> NamedArray:
        arrays = [a.rearrange((BATCH, KEY_POSITION)).array for a in (slots, as_keys(new))]
        joined = jnp.concatenate(arrays, axis=1)
        return NamedArray(joined, (slots.resolve_axis(BATCH), Axis(KEY_POSITION, joined.shape[1])))

    positions, segment_ids = inputs.positions, inputs.segment_ids
    return AttentionMask(positions, segment_ids, both(cache.positions, positions), both(cache.segment_ids, segment_ids))


def extended(cache: KVCache, inputs: Inputs, keys: NamedArray, values: NamedArray) -> KVCache:
    """The cache with the inputs' keys and values ({layers, batch, position, kv_heads, head_size}) in it."""
    return KVCache(
        kv_array_with(cache.keys, keys, cache.length),
        kv_array_with(cache.values, values, cache.length),
        *slots_with(cache, inputs),
    )


def slots_with(cache: KVCache | UnstackedCache, inputs: Inputs) -> tuple[NamedArray, NamedArray, jax.Array]:
    """The cache's positions, segment ids and length, with the inputs in it."""
    return (
        _with(cache.positions, as_keys(inputs.positions), cache.length),
        _with(cache.segment_ids, as_keys(inputs.segment_ids), cache.length),
        cache.length + inputs.tokens.axis_size(POSITION),
    )


def kv_array_with(column: KVArray, new: NamedArray, at: jax.Array) -> KVArray:
    """The column with {batch, position, kv_heads, head_size}, or that of all layers, in its slots from `at` on."""
    new = as_keys(new).rearrange((..., BATCH, KV_HEADS, KEY_POSITION, HEAD_SIZE))
    new = new if column.values.has_axis(BATCH) else by_cache_row(new)
    if column.scale is None:
        return KVArray(_with(column.values, new, at))
    numbers, scale = quantized(new)
    return KVArray(_with(column.values, numbers, at), _with(column.scale, scale, at))


def by_cache_row(x: NamedArray) -> NamedArray:
    """{.., batch, kv_heads, ..} as {.., cache_row, ..}, and without it where there is but one.

    An axis of size 1 would make XLA give what it reads another shape, and copy it to that end.
    """
    flat = x.flatten_axes((BATCH, KV_HEADS), CACHE_ROW)
    return flat[CACHE_ROW, 0] if flat.axis_size(CACHE_ROW) == 1 else flat


def quantized(values: NamedArray) -> tuple[NamedArray, NamedArray]:
    """{..., head_size} as int8, and the float32 {...} that they are to be multiplied by: the largest becomes 127."""
    exact = values.astype(jnp.float32)
    scale = hax.max(hax.abs(exact), HEAD_SIZE) / _LARGEST
    steps = hax.round(exact / hax.where(scale > 0, scale, 1.0))
    return steps.rearrange(values.axes).astype(jnp.int8), scale


def _with(slots: NamedArray, new: NamedArray, at: jax.Array) -> NamedArray:
    """Writes into {..., key_position, ...} from slot `at` on."""
    names = [axis.name for axis in slots.axes]
    array = new.rearrange(names).array.astype(slots.dtype)
    return NamedArray(
        jax.lax.dynamic_update_slice_in_dim(slots.array, array, at, names.index(KEY_POSITION)), slots.axes
    )
