"""Attention of some queries of a row to some of its keys, with what it takes to merge it with that to the other keys.

Queries and keys are parts of a row, in any order. Blocks of queries take the blocks of keys that any of them attends to,
one after the other; others cost nothing. Which blocks those are depends on the documents of the row and on where the
queries are in it, so it is decided on the device.

Source: FlashAttention-2, Dao 2023 (arXiv:2307.08691), algorithms 1 and 2.

Shapes: B batch, T queries, S keys, K key/value heads, G query heads per key/value head, H head size, V head size of values.
"""

import abc
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.hardware.hlo import turns_scope
from jaxlm.models.attention.backends.blockwise import UNMODIFIED_SCORES, Reach
from jaxlm.models.attention.null_slot import add_sink
from jaxlm.models.attention.scores import ScoreRule

_LARGEST_BLOCK = 512
_NO_SEGMENT = jnp.iinfo(jnp.int32).max


class Tokens(NamedTuple):
    """Says where tokens are, whatever their order in the array. Queries attend to keys of their segment, within `Reach`.

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


MASKED = -1e30  # finite, so that queries without keys stay finite when they are merged
_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class Factors(NamedTuple):
    """Holds the factors of scores.

    Attributes:
        scale: float32 scalar.
        slopes: float32 [K, G], those of ALiBi for the heads of this device; None without ALiBi.
    """

    scale: jax.Array
    slopes: jax.Array | None = None


class Partial(NamedTuple):
    """Attention to some keys. Tokens without any have output 0 and a logsumexp of -1e30; padding may have any numbers.

    Attributes:
        out: float32 [B, K, G, T, V].
        lse: float32 [B, K, G, T], the logsumexp of each query's scores.
    """

    out: jax.Array
    lse: jax.Array

    def merged(self, other: "Partial") -> "Partial":
        """Attention of the same queries to the keys of both."""
        lse = jnp.logaddexp(self.lse, other.lse)
        out, more = (part.out * jnp.exp(part.lse - lse)[..., None] for part in (self, other))
        return Partial(out + more, lse)

    def with_sink(self, sink_KG: jax.Array) -> "Partial":
        """Attention to these keys and a sink, once these are all keys."""
        lse, share = add_sink(self.lse, sink_KG[..., None])
        return Partial(self.out * share[..., None], lse)


class PartialAttention(abc.ABC):
    """A kernel for attention of queries to some of their keys. It is a constant of the program.

    `queries` and `keys` are their tokens, [B, T] and [B, S]. `hop` is how many devices back in the ring the keys come from;
    None if they are those of all devices.
    """

    @abc.abstractmethod
    def attend(
        self, q_BKGTH, k_BKSH, v_BKSV, queries: Tokens, keys: Tokens, factors: Factors, *, hop: Any = None
    ) -> Partial:
        """Attention of queries to keys of the same rows."""

    @abc.abstractmethod
    def gradients(
        self,
        q_BKGTH,
        k_BKSH,
        v_BKSV,
        queries: Tokens,
        keys: Tokens,
        factors: Factors,
        whole: Partial,
        d_out_BKGTV,
        *,
        hop: Any = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The float32 gradients of queries, keys and values through these scores.

        Args:
            whole: attention of the queries to all keys that they attend to, also those that are not among these.
            d_out_BKGTV: the gradient of its output.
        """


@dataclass(frozen=True)
class InBlocks(PartialAttention):
    """Blocks of queries against blocks of keys, for tokens in any order.

    Attributes:
        reach: which keys of its own document a query attends to.
        row_tokens: tokens of a row, for forecasts.
        rule: modifies the scaled scores before the softmax.
    """

    reach: Reach
    row_tokens: int
    rule: ScoreRule = UNMODIFIED_SCORES

    def attend(self, q_BKGTH, k_BKSH, v_BKSV, queries, keys, factors, *, hop=None) -> Partial:
        row = functools.partial(_row_forward, self, factors=factors)
        return Partial(*jax.lax.map(lambda args: row(*args), (q_BKGTH, k_BKSH, v_BKSV, queries, keys)))

    def gradients(self, q_BKGTH, k_BKSH, v_BKSV, queries, keys, factors, whole, d_out_BKGTV, *, hop=None):
        delta_BKGT = jnp.sum(d_out_BKGTV.astype(jnp.float32) * whole.out.astype(jnp.float32), axis=-1)
        row = functools.partial(_row_backward, self, factors=factors)
        arrays = (q_BKGTH, k_BKSH, v_BKSV, queries, keys, whole.lse, delta_BKGT, d_out_BKGTV)
        return jax.lax.map(lambda args: row(*args), arrays)

    def scope(self, num_partners: int, size: int):
        """The named scope of a loop over those of `num_partners` blocks of `size` tokens that a block is multiplied with."""
        row_blocks = -(-self.row_tokens // size)
        return jax.named_scope(turns_scope(expected_partners(num_partners, row_blocks, size, self.reach)))


class _Blocks(NamedTuple):
    """For each block, the numbers of its partners, those that it needs first, and how many it needs."""

    partners: jax.Array
    counts: jax.Array

    @staticmethod
    def of(pairs: jax.Array) -> "_Blocks":
        """Args: pairs: boolean [blocks, partners]."""
        return _Blocks(jnp.argsort(~pairs, axis=1, stable=True), jnp.sum(pairs, axis=1, dtype=jnp.int32))


def _padded(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths) if widths[axis][1] else x


def _block(x: jax.Array, number: jax.Array, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)


def _joined(blocks: jax.Array, axis: int, size: int) -> jax.Array:
    """[blocks, ...] with the blocks along `axis` of one of them, without padding."""
    moved = jnp.moveaxis(blocks, 0, axis)
    joined = moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
    return jax.lax.slice_in_dim(joined, 0, size, axis=axis)


def _block_scores(kernel: InBlocks, q, k, queries: Tokens, keys: Tokens, factors: Factors):
    """Scaled scores, modified and masked scores, and the mask, [K, G, Q, S] (mask [Q, S])."""
    scaled = _einsum("kgqh,ksh->kgqs", q, k) * factors.scale
    mask = attends(queries, keys, kernel.reach)
    modified = kernel.rule(scaled[None], distances(queries, keys)[None], factors.slopes)[0]
    return scaled, jnp.where(mask, modified, MASKED), mask


def _row_forward(kernel: InBlocks, q_KGTH, k_KSH, v_KSV, queries: Tokens, keys: Tokens, *, factors: Factors):
    num_queries, query_block, key_block = q_KGTH.shape[2], block_size(q_KGTH.shape[2]), block_size(k_KSH.shape[1])
    q_KGTH, (k_KSH, v_KSV) = _padded(q_KGTH, 2, query_block), (_padded(a, 1, key_block) for a in (k_KSH, v_KSV))
    queries, keys = (
        Tokens(*(_padded(a, 0, size) for a in t)) for t, size in ((queries, query_block), (keys, key_block))
    )
    needed = _Blocks.of(block_pairs(queries, keys, kernel.reach, query_block, key_block))

    def query_block_output(number):
        q, block_queries = _block(q_KGTH, number, query_block, 2), queries.block(number, query_block)

        def add_keys(nth, state):
            top, total, out = state
            at = needed.partners[number, nth]
            k, v = (_block(a, at, key_block, 1) for a in (k_KSH, v_KSV))
            _, masked, mask = _block_scores(kernel, q, k, block_queries, keys.block(at, key_block), factors)
            new_top = jnp.maximum(top, jnp.max(masked, axis=-1))
            weights = jnp.where(mask, jnp.exp(masked - new_top[..., None]), 0.0)
            decay = jnp.exp(top - new_top)
            out = out * decay[..., None] + _einsum("kgqs,ksv->kgqv", weights.astype(v.dtype), v)
            return new_top, total * decay + jnp.sum(weights, axis=-1), out

        shape = q.shape[:3]
        empty = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, v_KSV.shape[-1])))
        empty = jax.tree.map(lambda a: a.astype(jnp.float32), empty)
        with kernel.scope(needed.partners.shape[1], key_block):
            top, total, out = jax.lax.fori_loop(0, needed.counts[number], add_keys, empty)
        divisor = jnp.where(total > 0, total, 1.0)
        return out / divisor[..., None], jnp.where(total > 0, top + jnp.log(divisor), MASKED)

    out, lse = jax.lax.map(query_block_output, jnp.arange(q_KGTH.shape[2] // query_block))
    return _joined(out, 2, num_queries), _joined(lse, 2, num_queries)


def _row_backward(
    kernel: InBlocks,
    q_KGTH,
    k_KSH,
    v_KSV,
    queries: Tokens,
    keys: Tokens,
    lse_KGT,
    delta_KGT,
    d_out_KGTV,
    *,
    factors: Factors,
):
    num_queries, num_keys = q_KGTH.shape[2], k_KSH.shape[1]
    query_block, key_block = block_size(num_queries), block_size(num_keys)
    q_KGTH, lse_KGT, delta_KGT, d_out_KGTV = (
        _padded(a, 2, query_block) for a in (q_KGTH, lse_KGT, delta_KGT, d_out_KGTV)
    )
    k_KSH, v_KSV = (_padded(a, 1, key_block) for a in (k_KSH, v_KSV))
    queries, keys = (
        Tokens(*(_padded(a, 0, size) for a in t)) for t, size in ((queries, query_block), (keys, key_block))
    )
    needed = _Blocks.of(block_pairs(queries, keys, kernel.reach, query_block, key_block).T)

    def key_block_gradients(dq_KGTH, number):
        k, v = (_block(a, number, key_block, 1) for a in (k_KSH, v_KSV))
        block_keys = keys.block(number, key_block)

        def add_queries(nth, gradients):
            dq_KGTH, dk, dv = gradients
            at = needed.partners[number, nth]
            q, lse, delta, d_out = (_block(a, at, query_block, 2) for a in (q_KGTH, lse_KGT, delta_KGT, d_out_KGTV))
            scaled, masked, mask = _block_scores(kernel, q, k, queries.block(at, query_block), block_keys, factors)
            weights = jnp.where(mask, jnp.exp(masked - lse[..., None]), 0.0)
            dv += _einsum("kgqs,kgqv->ksv", weights.astype(d_out.dtype), d_out)
            d_weights = _einsum("kgqv,ksv->kgqs", d_out, v)
            d_scores = weights * (d_weights - delta[..., None]) * kernel.rule.derivative(scaled) * factors.scale
            d_scores = d_scores.astype(q.dtype)
            dq = _block(dq_KGTH, at, query_block, 2) + _einsum("kgqs,ksh->kgqh", d_scores, k)
            dq_KGTH = jax.lax.dynamic_update_slice_in_dim(dq_KGTH, dq, at * query_block, 2)
            return dq_KGTH, dk + _einsum("kgqs,kgqh->ksh", d_scores, q), dv

        dk, dv = (jnp.zeros(a.shape, jnp.float32) for a in (k, v))
        with kernel.scope(needed.partners.shape[1], query_block):
            dq_KGTH, dk, dv = jax.lax.fori_loop(0, needed.counts[number], add_queries, (dq_KGTH, dk, dv))
        return dq_KGTH, (dk, dv)

    dq = jnp.zeros(q_KGTH.shape, jnp.float32)
    dq, (dk, dv) = jax.lax.scan(key_block_gradients, dq, jnp.arange(k_KSH.shape[1] // key_block))
    return dq[:, :, :num_queries], _joined(dk, 1, num_keys), _joined(dv, 1, num_keys)
