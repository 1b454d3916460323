"""The cache of attention: keys and values, with a scale for each if they are stored as integers."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSpec, NamedArray

from jaxlm.core.axes import BATCH, CACHE_ROW, HEAD_SIZE, KEY_HEADS, KEY_POSITION, KV_HEADS, axes_of
from jaxlm.core.products.stored_weights import quantize
from jaxlm.core.tree import is_named
from jaxlm.models.attention.api import as_keys
from jaxlm.models.mixers.base import LayerCache
from jaxlm.models.mixers.slots import update_slots


class KVArray(eqx.Module):
    """The keys (or the values) in a cache. Heads come before positions, so that the keys of a head are one matrix.

    Attributes:
        values: {layers, batch, kv_heads, key_position, head_size}, without `layers` for one layer; keys may have `key_heads`,
            and what all heads share has none.
        scale: float32 {layers, batch, kv_heads, key_position}, the quantization scale of int8 entries; None if the
            entries are not quantized.
    """

    values: NamedArray
    scale: NamedArray | None = None

    @staticmethod
    def empty(Batch: Axis, capacity: int, Out: AxisSpec, dtype: Any) -> "KVArray":
        """Zeros in all slots of one layer. Args: Out: heads and features, in any order."""
        sizes = {axis.name: axis for axis in axes_of(Out)}
        Size = sizes.pop(HEAD_SIZE)
        axes = (Batch, *sizes.values(), Axis(KEY_POSITION, capacity))
        scale = hax.zeros(axes, dtype=jnp.float32) if jnp.dtype(dtype) == jnp.int8 else None
        return KVArray(hax.zeros((*axes, Size), dtype=dtype), scale)


class KeyValue(eqx.Module):
    """One layer's keys and values of new tokens, {batch, position, kv_heads, head_size}. Keys may have `key_heads`."""

    keys: NamedArray
    values: NamedArray


class KeyValueCache(LayerCache):
    """Keys and values of a layer. Where `flattened`, batch and heads are one axis (`by_cache_row`)."""

    keys: KVArray
    values: KVArray

    @staticmethod
    def empty(Batch: Axis, capacity: int, Keys: AxisSpec, Values: AxisSpec, dtype: Any) -> "KeyValueCache":
        """Args: Keys, Values: their heads and features."""
        return KeyValueCache(*(KVArray.empty(Batch, capacity, Out, dtype) for Out in (Keys, Values)))

    def extended(self, new: KeyValue, start: jax.Array | None) -> "KeyValueCache":
        return KeyValueCache(
            *(write_kv_array(*pair, start) for pair in ((self.keys, new.keys), (self.values, new.values)))
        )

    def flattened(self) -> "KeyValueCache":
        return jax.tree.map(by_cache_row, self, is_leaf=is_named)

    def unflattened(self, Batch: Axis) -> "KeyValueCache":
        def apart(leaf: NamedArray) -> NamedArray:
            trailing = leaf.axes[[axis.name for axis in leaf.axes].index(KEY_POSITION) :]
            leading = tuple(axis for axis in leaf.axes if axis not in trailing and axis.name != CACHE_ROW)
            array = leaf.array.reshape(
                *(axis.size for axis in (*leading, Batch)), -1, *(axis.size for axis in trailing)
            )
            return NamedArray(array, (*leading, Batch, Axis(KV_HEADS, array.shape[len(leading) + 1]), *trailing))

        keys, values = (jax.tree.map(apart, one, is_leaf=is_named) for one in (self.keys, self.values))
        if keys.values.axis_size(KV_HEADS) != values.values.axis_size(KV_HEADS):
            keys = jax.tree.map(lambda x: x.rename({KV_HEADS: KEY_HEADS}), keys, is_leaf=is_named)
        return KeyValueCache(keys, values)


def write_kv_array(kv_array: KVArray, new: NamedArray, start: jax.Array | None) -> KVArray:
    """Writes {batch, position, kv_heads, head_size}, optionally with `layers`, from slot `start` on, or to an
    empty cache. Keys may have `key_heads` instead, or no heads."""
    new = as_keys(new).rearrange((..., BATCH, *_heads(new), KEY_POSITION, HEAD_SIZE))
    new = new if kv_array.values.has_axis(BATCH) else by_cache_row(new)
    if kv_array.scale is None:
        return KVArray(update_slots(kv_array.values, new, start))
    values, scale = quantize(new, HEAD_SIZE)
    return KVArray(update_slots(kv_array.values, values, start), update_slots(kv_array.scale, scale, start))


def by_cache_row(x: NamedArray) -> NamedArray:
    """Flattens {.., batch, kv_heads or key_heads or neither, ..} to {.., cache_row, ..}; drops the axis if its size is 1.

    With an axis of size 1, XLA would reshape the array before reading it, which copies it.
    """
    flat = x.flatten_axes((BATCH, *_heads(x)), CACHE_ROW)
    return flat[CACHE_ROW, 0] if flat.axis_size(CACHE_ROW) == 1 else flat


def _heads(x: NamedArray) -> tuple[str, ...]:
    return tuple(name for name in (KV_HEADS, KEY_HEADS) if x.has_axis(name))
