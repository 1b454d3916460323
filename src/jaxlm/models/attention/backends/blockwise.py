"""Blockwise attention: each block of queries against only the keys that it can attend to.

Source: FlashAttention, Dao et al. 2022 (arXiv:2205.14135), sections 3.1 and B.4. The forward pass saves each query's
logsumexp, and the backward pass recomputes the weights from it, so no [T, T] array outlives its block. Each block is a
pair of XLA matrix products over all keys that it may attend to; keys outside its window, and with a causal mask those after
the block, are skipped.

Shapes: B batch, T position, K key/value heads, G query heads per key/value head, H head size, Q queries of a block, S
keys of a block.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxlm.core.devices import caches, rows_in_half
from jaxlm.core.sharding import current_platform
from jaxlm.core.tracing import CustomVjp, trace_options
from jaxlm.models.attention.null_slot import add_sink, sink_gradient
from jaxlm.models.attention.scores import ScoreRule

ATTENTION = "attention"
"""Checkpoint name of the output and the logsumexp in remat policies."""
UNMODIFIED_SCORES = ScoreRule()
"""The identity."""
_MAX_BLOCKS = 8  # each is compiled by itself
_SMALLEST, _LARGEST = 64, 512
_MASKED = -1e30  # finite, so that fully masked rows stay finite in both passes


def blockwise_attention(
    q_BTKGH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_BT: jax.Array,
    scale: float | jax.Array,
    window: int | None,
    rule: ScoreRule = UNMODIFIED_SCORES,
    *,
    causal: bool = True,
    sink_KG: jax.Array | None = None,
) -> jax.Array:
    """Attention within segments; returns [B, T, K, G, H].

    Args:
        segment_BT: integer segment ids; 0 is padding, which neither attends nor is attended to. Positions increase
            along the row.
        scale: factor of the scores.
        window: number of tokens that a query attends to, including itself; None means all.
        rule: modifies the scaled scores before the softmax.
        causal: a query attends to no later key. False extends the window to as many later keys.
        sink_KG: float32, a score beside those of the keys (`jaxlm.models.attention.null_slot`); None for none.
    """
    heads_first = (t.transpose(0, *range(2, t.ndim - 1), 1, t.ndim - 1) for t in (q_BTKGH, k_BTKH, v_BTKH))
    factor = jnp.asarray(scale, jnp.float32)
    out_BKGTH: Any = _attend(Reach(window, causal), rule, *heads_first, segment_BT, factor, sink_KG)
    return out_BKGTH.transpose(0, 3, 1, 2, 4)


def default_attention_block(platform: str) -> int:
    """Queries per block: large enough for efficient matrix products, small enough to skip most masked scores.

    On CPUs, the float32 scores of a block with 1,024 keys take at most half of a thread's level-2 cache: 128 queries for 1
    MiB. So do other platforms, and CPUs whose cache is unknown.
    """
    cache = caches().level2 if platform == "cpu" else None
    return 128 if cache is None else min(max(rows_in_half(cache, 4 * 1024), _SMALLEST), _LARGEST)


@dataclass(frozen=True)
class Reach:
    """Says which keys of its own document a query attends to.

    Attributes:
        window: number of tokens that it attends to, including itself; None means all.
        causal: no later ones. Otherwise the window extends to as many later keys.
    """

    window: int | None = None
    causal: bool = True

    def includes(self, distance: jax.Array) -> jax.Array:
        """Tells whether it attends to a key. Args: distance: query position minus key position."""
        near = distance >= 0 if self.causal else jnp.ones(distance.shape, bool)
        return near if self.window is None else near & (jnp.abs(distance) < self.window)


def query_blocks(length: int, reach: Reach, block: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """Yields (first query, last query + 1, first key, last key + 1) of each block.

    Without a window there are at most 8 blocks. With a causal mask, eight compute 9/16 of the [T, T] scores (an exact mask
    needs 8/16).

    Args:
        block: queries per block, more if there would be too many blocks; None uses that of the trace options, else
            `default_attention_block`.
    """
    block = block or trace_options().block_sizes.attention_block or default_attention_block(current_platform())
    size = max(block, -(-length // _MAX_BLOCKS))
    if reach.window is not None:
        size = min(size, max(block, reach.window))
    others = length if reach.window is None else reach.window - 1
    for start in range(0, length, size):
        stop = min(start + size, length)
        yield start, stop, max(0, start - others), stop if reach.causal else min(stop + others, length)


def _block_mask(segment_BT: jax.Array, queries: slice, keys: slice, reach: Reach) -> jax.Array:
    """Boolean [B, 1, 1, Q, S]: whether each query of the block attends to each key."""
    near = reach.includes(_distance(queries, keys))
    same = segment_BT[:, queries, None] == segment_BT[:, None, keys]
    return (near & same & (segment_BT != 0)[:, queries, None])[:, None, None]


def _scaled_scores(q_BKGQH, k_BKSH, scale):
    return jnp.einsum("bkgqh,bksh->bkgqs", q_BKGQH, k_BKSH, preferred_element_type=jnp.float32) * scale


def _distance(queries: slice, keys: slice) -> jax.Array:
    """Query position minus key position, [1, Q, S]."""
    return (jnp.arange(queries.start, queries.stop)[:, None] - jnp.arange(keys.start, keys.stop)[None, :])[None]


def blockwise_forward(
    reach: Reach, q_BKGTH, k_BKTH, v_BKTH, segment_BT, scale, rule: ScoreRule = UNMODIFIED_SCORES, sink_KG=None
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, K, G, T, H] and the logsumexp [B, K, G, T] of each query's scores."""
    outs, lses = [], []
    for start, stop, first, last in query_blocks(segment_BT.shape[1], reach):
        queries, keys = slice(start, stop), slice(first, last)
        mask = _block_mask(segment_BT, queries, keys, reach)
        scaled = _scaled_scores(q_BKGTH[:, :, :, queries], k_BKTH[:, :, keys], scale)
        scores = rule(scaled, _distance(queries, keys))
        scores = jnp.where(mask, scores, _MASKED)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = jnp.einsum(
            "bkgqs,bksh->bkgqh",
            weights.astype(v_BKTH.dtype),
            v_BKTH[:, :, keys],
            preferred_element_type=jnp.float32,
        )
        is_token = (segment_BT[:, None, None, queries] != 0)[..., None]
        out, lse = out / total, top + jnp.log(total)
        if sink_KG is not None:
            lse, share = add_sink(lse, sink_KG[..., None, None])
            out *= share
        outs.append(jnp.where(is_token, out, 0.0).astype(v_BKTH.dtype))
        lses.append(lse[..., 0])
    return jnp.concatenate(outs, axis=3), jnp.concatenate(lses, axis=3)


@functools.partial(CustomVjp, nondiff_argnums=(0, 1))
def _attend(reach, rule, q_BKGTH, k_BKTH, v_BKTH, segment_BT, scale, sink_KG):
    return blockwise_forward(reach, q_BKGTH, k_BKTH, v_BKTH, segment_BT, scale, rule, sink_KG)[0]


def _attend_forward(reach, rule, q_BKGTH, k_BKTH, v_BKTH, segment_BT, scale, sink_KG):
    out, lse = blockwise_forward(reach, q_BKGTH, k_BKTH, v_BKTH, segment_BT, scale, rule, sink_KG)
    out, lse = checkpoint_name(out, ATTENTION), checkpoint_name(lse, ATTENTION)
    return out, (q_BKGTH, k_BKTH, v_BKTH, segment_BT, scale, sink_KG, out, lse)


def _attend_backward(reach, rule, residuals, d_out_BKGTH):
    q, k, v, segment, scale, sink, out, lse = residuals
    gradients = blockwise_backward(reach, q, k, v, segment, scale, out, lse, d_out_BKGTH, rule)
    if sink is not None:
        by_query = sink_gradient(sink[..., None], lse, _delta(out, d_out_BKGTH))
        sink = jnp.sum(by_query, axis=(0, 3))
    return *gradients, None, None, sink


def _delta(out: jax.Array, d_out: jax.Array) -> jax.Array:
    return jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)


def blockwise_backward(
    reach: Reach,
    q_BKGTH,
    k_BKTH,
    v_BKTH,
    segment_BT,
    scale,
    out_BKGTH,
    lse_BKGT,
    d_out_BKGTH,
    rule: ScoreRule = UNMODIFIED_SCORES,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of queries, keys and values, given the results of `blockwise_forward`."""
    delta_BKGT = _delta(out_BKGTH, d_out_BKGTH)
    dk, dv = (jnp.zeros(t.shape, jnp.float32) for t in (k_BKTH, v_BKTH))
    dqs = []
    for start, stop, first, last in query_blocks(segment_BT.shape[1], reach):
        queries, keys = slice(start, stop), slice(first, last)
        q, d_out = (t[:, :, :, queries] for t in (q_BKGTH, d_out_BKGTH))
        lse, delta = (t[:, :, :, queries, None] for t in (lse_BKGT, delta_BKGT))
        k, v = (t[:, :, keys] for t in (k_BKTH, v_BKTH))
        mask = _block_mask(segment_BT, queries, keys, reach)
        scaled = _scaled_scores(q, k, scale)
        scores = jnp.where(mask, rule(scaled, _distance(queries, keys)), _MASKED)
        weights = jnp.where(mask, jnp.exp(scores - lse), 0.0)
        f32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        dv = dv.at[:, :, keys].add(f32("bkgqs,bkgqh->bksh", weights.astype(d_out.dtype), d_out))
        d_weights = f32("bkgqh,bksh->bkgqs", d_out, v)
        d_scores = (weights * (d_weights - delta) * rule.derivative(scaled) * scale).astype(q.dtype)
        dqs.append(f32("bkgqs,bksh->bkgqh", d_scores, k).astype(q.dtype))
        dk = dk.at[:, :, keys].add(f32("bkgqs,bkgqh->bksh", d_scores, q))
    return jnp.concatenate(dqs, axis=3), dk.astype(k_BKTH.dtype), dv.astype(v_BKTH.dtype)


_attend.defvjp(_attend_forward, _attend_backward)
