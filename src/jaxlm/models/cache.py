"""The key/value cache: making one, and writing to it."""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import KEY_POSITION, POSITION
from jaxlm.models.attention import Visibility, as_keys
from jaxlm.models.base import Cache, Inputs


def empty_cache(Layers: Axis, Batch: Axis, capacity: int, KVHeads: Axis, HeadSize: Axis, dtype) -> Cache:
    """A cache of `capacity` slots a row, all of them empty."""
    KeyPos = Axis(KEY_POSITION, capacity)
    contents = hax.auto_sharded(hax.zeros((Layers, Batch, KeyPos, KVHeads, HeadSize), dtype=dtype))
    slots = hax.auto_sharded(hax.zeros((Batch, KeyPos), dtype=jnp.int32))
    return Cache(contents, contents, slots, slots, jnp.zeros((), jnp.int32))


def append(column: NamedArray, new: NamedArray, at: jax.Array) -> NamedArray:
    """Writes {..., position, ...} values into a {..., key_position, ...} column, from slot `at` on."""
    names = [axis.name for axis in column.axes]
    new = as_keys(new).rearrange(names).astype(column.dtype)
    array = jax.lax.dynamic_update_slice_in_dim(column.array, new.array, at, names.index(KEY_POSITION))
    return NamedArray(array, column.axes)


def visible_with(cache: Cache, inputs: Inputs) -> Visibility:
    """What the inputs see once they stand in the cache themselves."""
    return Visibility(
        inputs.positions,
        inputs.segment_ids,
        append(cache.positions, inputs.positions, cache.length),
        append(cache.segment_ids, inputs.segment_ids, cache.length),
    )


def extended(cache: Cache, visibility: Visibility, keys: NamedArray, values: NamedArray) -> Cache:
    """The cache with the inputs' keys and values ({layers, batch, position, kv_heads, head_size}) in it."""
    return Cache(
        append(cache.keys, keys, cache.length),
        append(cache.values, values, cache.length),
        visibility.key_positions,
        visibility.key_segment_ids,
        cache.length + keys.axis_size(POSITION),
    )
