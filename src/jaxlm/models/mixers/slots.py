"""Arrays of a decoding cache with a slot for each token, along the axis `key_position`."""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import KEY_POSITION


def update_slots(slots: NamedArray, new: NamedArray, start: jax.Array | None) -> NamedArray:
    """Writes to {..., key_position, ...} from slot `start` on, or to empty slots."""
    names = [axis.name for axis in slots.axes]
    array, dim = new.rearrange(names).array.astype(slots.dtype), names.index(KEY_POSITION)
    if start is None:
        # Not a write at an index: for that, the partitioner gathers slots that are sharded.
        widths = [(0, 0)] * array.ndim
        widths[dim] = (0, slots.array.shape[dim] - array.shape[dim])
        return hax.auto_sharded(NamedArray(jnp.pad(array, widths), slots.axes))
    return NamedArray(jax.lax.dynamic_update_slice_in_dim(slots.array, array, start, dim), slots.axes)


def grown_slots(leaf: NamedArray, capacity: int) -> NamedArray:
    """An array with this many slots, of which the last ones are zero. One without an axis `key_position` stays as it is."""
    if not leaf.has_axis(KEY_POSITION):
        return leaf
    KeyPos = leaf.resolve_axis(KEY_POSITION)
    widths = [(0, capacity - KeyPos.size if axis == KeyPos else 0) for axis in leaf.axes]
    axes = tuple(KeyPos.resize(capacity) if axis == KeyPos else axis for axis in leaf.axes)
    return hax.auto_sharded(NamedArray(jnp.pad(leaf.array, widths), axes))
