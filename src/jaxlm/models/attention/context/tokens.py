"""The tokens of queries and keys that are parts of a row, in any order, and which blocks of them attend to each other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.models.attention.backends.blockwise import Reach

_LARGEST_BLOCK = 512
_NO_SEGMENT = jnp.iinfo(jnp.int32).max


class Tokens(NamedTuple):
    """Where tokens are, whatever their order in the array. Queries attend to keys of their own segment, within `Reach`.

    Attributes:
        positions: int32 [..., T], position within the document.
        segments: int32 [..., T], number of the document within its row; 0 is padding.
    """

    positions: jax.Array
    segments: jax.Array

    def block(self, number: jax.Array, size: int) -> "Tokens":
        """Some consecutive tokens of one row. Args: number: of the block, from 0."""
        return Tokens(*(jax.lax.dynamic_slice_in_dim(a, number * size, size) for a in self))


def block_size(num_tokens: int) -> int:
    """Tokens per block: at most 512, at least two blocks to a device, so that no block spans both parts of a zigzag."""
    return min(_LARGEST_BLOCK, -(-num_tokens // 2))


def expected_partners(num_partners: int, row_blocks: int, size: int, reach: Reach) -> float:
    """With how many of some blocks a block of a row with one document is multiplied, in the mean over the blocks of the row.

    Args:
        num_partners: number of blocks, from anywhere in the row.
        row_blocks: number of blocks that the row has.
        size: tokens of a block.
    """
    needed = (row_blocks + 1) / 2 if reach.causal else row_blocks
    if reach.window is not None:
        beside = -(-(reach.window - 1) // size)
        needed = min(needed, 1 + beside * (1 if reach.causal else 2))
    return num_partners * needed / row_blocks


def distances(queries: Tokens, keys: Tokens) -> jax.Array:
    """Query position minus key position, [Q, S], of tokens of one row."""
    return queries.positions[:, None] - keys.positions[None, :]


def attends(queries: Tokens, keys: Tokens, reach: Reach) -> jax.Array:
    """Boolean [Q, S]: which queries attend to which keys of one row."""
    same = (queries.segments[:, None] == keys.segments[None, :]) & (queries.segments != 0)[:, None]
    return same & reach.includes(distances(queries, keys))


class _Bounds(NamedTuple):
    """The first and the last token of each block, by segment and then by position. int32 [blocks]."""

    first_segment: jax.Array
    first_position: jax.Array
    last_segment: jax.Array
    last_position: jax.Array

    @staticmethod
    def of(tokens: Tokens, size: int) -> "_Bounds":
        positions, segments = (a.reshape(-1, size) for a in tokens)
        first = jnp.min(jnp.where(segments == 0, _NO_SEGMENT, segments), axis=1)
        last = jnp.max(segments, axis=1)
        is_first, is_last = segments == first[:, None], segments == last[:, None]
        return _Bounds(
            first,
            jnp.min(jnp.where(is_first, positions, _NO_SEGMENT), axis=1),
            last,
            jnp.max(jnp.where(is_last, positions, -1), axis=1),
        )


def block_pairs(queries: Tokens, keys: Tokens, reach: Reach, query_block: int, key_block: int) -> jax.Array:
    """Boolean [query blocks, key blocks]: false if no query of the block attends to any key of the other, in one row.

    True for a few pairs of blocks that do not attend to each other, if both hold several documents.
    """
    q = _Bounds(*(a[:, None] for a in _Bounds.of(queries, query_block)))
    k = _Bounds.of(keys, key_block)
    pairs = (q.first_segment <= k.last_segment) & (k.first_segment <= q.last_segment) & (q.last_segment != 0)
    if reach.causal:
        pairs &= (k.first_segment < q.last_segment) | (k.first_position <= q.last_position)
    if reach.window is not None:
        pairs &= (k.last_segment > q.first_segment) | (q.first_position - k.last_position < reach.window)
        if not reach.causal:
            pairs &= (k.first_segment < q.last_segment) | (k.first_position - q.last_position < reach.window)
    return pairs
