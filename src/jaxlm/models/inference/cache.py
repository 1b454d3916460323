"""The decoding cache of a model: what each of its layers keeps of earlier tokens, and where these tokens are."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, KEY_POSITION, POSITION
from jaxlm.core.tree import is_named
from jaxlm.models.attention.api import AttentionMask, as_keys
from jaxlm.models.base import Inputs
from jaxlm.models.mixers.base import LayerCache, Mixer
from jaxlm.models.mixers.slots import update_slots


class DecodingCache(eqx.Module):
    """A cache for decoding token by token.

    Attributes:
        stacks: what the layers of each stack keep, with an axis `layers`.
        positions, segment_ids: int32 {batch, key_position}; segment 0 marks an empty slot.
        length: scalar int32, the number of slots in use (the same for all rows, because prompts are padded on the
            left).
        fresh: the cache is empty, so the first inputs attend only to each other, as in training.
        tokens: int32 {batch, key_position}, the token in each slot; None unless the model reads earlier tokens.
    """

    stacks: tuple[LayerCache, ...]
    positions: NamedArray
    segment_ids: NamedArray
    length: jax.Array
    fresh: bool = eqx.field(static=True, default=False)
    tokens: NamedArray | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that all layers keep of a token."""
        return sum(layers.bytes_per_token for layers in self.stacks)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of the states of a text in all layers, whatever its length."""
        return sum(layers.bytes_per_row for layers in self.stacks)


class UnstackedCache(eqx.Module):
    """A `DecodingCache` with separate arrays per layer, `flattened`.

    Attributes:
        stacks: the layers of each stack.
        positions, segment_ids, length, tokens: as of a `DecodingCache`.
    """

    stacks: tuple[tuple[LayerCache, ...], ...]
    positions: NamedArray
    segment_ids: NamedArray
    length: jax.Array
    tokens: NamedArray | None = None


def empty_cache(
    stacks: Sequence[hnn.Stacked], Batch: Axis, capacity: int, dtype: Any, *, with_tokens: bool
) -> DecodingCache:
    """Creates an empty cache with `capacity` slots per row.

    Args:
        stacks: the blocks of each stack.
        with_tokens: the cache holds the tokens too, for a model that reads earlier ones.
    """

    def of_stack(layers: hnn.Stacked) -> LayerCache:
        one = mixer_of(layers.stacked).init_cache(Batch, capacity, dtype)
        stacked = lambda leaf: hax.auto_sharded(hax.zeros((layers.Block, *leaf.axes), dtype=leaf.dtype))  # noqa: E731
        return jax.tree.map(stacked, one, is_leaf=is_named)

    slots = hax.auto_sharded(hax.zeros((Batch, Axis(KEY_POSITION, capacity)), dtype=jnp.int32))
    return DecodingCache(
        tuple(map(of_stack, stacks)), slots, slots, jnp.int32(0), fresh=True, tokens=slots if with_tokens else None
    )


def mixer_of(block: Any) -> Mixer:
    """The mixer of a block, which may be those of all layers of a stack."""
    (mixer,) = tree.modules(block, Mixer)
    return mixer


def has_state(cache: DecodingCache | UnstackedCache) -> bool:
    """Tells whether layers keep a state, which cannot be taken back to an earlier token."""
    return not all(leaf.has_axis(KEY_POSITION) for leaf in jax.tree.leaves(cache.stacks, is_leaf=is_named))


def mask_over_cache(cache: DecodingCache | UnstackedCache, inputs: Inputs) -> AttentionMask:
    """The mask of new inputs whose keys are the cached slots followed by the inputs themselves."""

    def concatenated(slots: NamedArray, new: NamedArray) -> NamedArray:
        arrays = [a.rearrange((BATCH, KEY_POSITION)).array for a in (slots, as_keys(new))]
        joined = jnp.concatenate(arrays, axis=1)
        return NamedArray(joined, (slots.resolve_axis(BATCH), Axis(KEY_POSITION, joined.shape[1])))

    positions, segment_ids = inputs.positions, inputs.segment_ids
    key_positions = concatenated(cache.positions, positions)
    return AttentionMask(positions, segment_ids, key_positions, concatenated(cache.segment_ids, segment_ids))


def extend_cache(cache: DecodingCache, inputs: Inputs, new: Sequence[Any]) -> DecodingCache:
    """Writes the inputs to the cache. Args: new: what the layers of each stack have returned, with an axis `layers`."""
    start = _next_slot(cache)
    stacks = tuple(layers.extended(of_stack, start) for layers, of_stack in zip(cache.stacks, new, strict=True))
    return DecodingCache(stacks, **extend_slots(cache, inputs))


def extend_slots(cache: DecodingCache | UnstackedCache, inputs: Inputs) -> dict[str, Any]:
    """Positions, segment ids, tokens and length of the cache after the inputs are added."""
    tokens, start = cache.tokens, _next_slot(cache)
    return {
        "positions": update_slots(cache.positions, as_keys(inputs.positions), start),
        "segment_ids": update_slots(cache.segment_ids, as_keys(inputs.segment_ids), start),
        "length": cache.length + inputs.tokens.axis_size(POSITION),
        "tokens": None if tokens is None else update_slots(tokens, as_keys(inputs.tokens), start),
    }


def _next_slot(cache: DecodingCache | UnstackedCache) -> jax.Array | None:
    """The first empty slot; None if all are, which is known when the program is traced."""
    return None if isinstance(cache, DecodingCache) and cache.fresh else cache.length
