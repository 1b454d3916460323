"""Causal attention in blocks of queries, each against only the keys that its block can see.

Source: the online form of softmax attention of Dao et al. 2022 (arXiv:2205.14135), sections 3.1 and B.4: the forward
pass keeps each query's log-sum-exp beside the output, and the backward pass makes the weights again from it, so that no
[T, T] array outlives its block. A block is one pair of matrix products of plain XLA over all the keys that it may see;
what lies wholly in a block's future, or before its window, is never computed.

Shapes: B batch, T position, K key/value heads, G query heads a key/value head, H head size, Q queries of a block, S keys
that a block sees.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxlm.core.custom_vjp import CustomVjp
from jaxlm.models.attention.scores import ScoreRule

ATTENTION = "attention"
"""What recomputation policies know the output and its log-sum-exp by."""
PLAIN_SCORES = ScoreRule()
"""Scores go into the softmax as they are."""
_SMALLEST_BLOCK = 128
_MOST_BLOCKS = 8
_HIDDEN = -1e30  # finite: a block that sees nothing stays finite both ways


def blockwise_attention(
    q_BTKGH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_BT: jax.Array,
    scale: float | jax.Array,
    window: int | None,
    rule: ScoreRule = PLAIN_SCORES,
) -> jax.Array:
    """[B, T, K, G, H]: each query's mean of the values of its own segment, from itself back.

    Args:
        segment_BT: int; a token of segment 0 sees nothing and is seen by nothing. Positions rise along the row.
        scale: what scores are multiplied by.
        window: how many tokens a query sees, itself included; None means all.
        rule: what becomes of scores before the softmax.
    """
    heads_first = (t.transpose(0, *range(2, t.ndim - 1), 1, t.ndim - 1) for t in (q_BTKGH, k_BTKH, v_BTKH))
    out_BKGTH: Any = _attend(window, rule, *heads_first, segment_BT, jnp.asarray(scale, jnp.float32))
    return out_BKGTH.transpose(0, 3, 1, 2, 4)


def blocks_of(length: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """(first query, last query + 1, first key) of every block; the last key is the last query.

    Without a window at most 8, which compute 9/16 of the square where the causal half would be 8/16.
    """
    size = max(_SMALLEST_BLOCK, -(-length // _MOST_BLOCKS))
    if window is not None:
        size = min(size, max(_SMALLEST_BLOCK, window))
    for start in range(0, length, size):
        yield start, min(start + size, length), 0 if window is None else max(0, start - window + 1)


def _visible(segment_BT: jax.Array, start: int, stop: int, first: int, window: int | None) -> jax.Array:
    """[B, 1, 1, Q, S], true where a query of the block may look."""
    query, key = jnp.arange(start, stop)[:, None], jnp.arange(first, stop)[None, :]
    near = key <= query
    if window is not None:
        near &= key > query - window
    same = segment_BT[:, start:stop, None] == segment_BT[:, None, first:stop]
    return (near & same & (segment_BT != 0)[:, start:stop, None])[:, None, None]


def _scaled(q_BKGQH, k_BKSH, scale):
    return jnp.einsum("bkgqh,bksh->bkgqs", q_BKGQH, k_BKSH, preferred_element_type=jnp.float32) * scale


def _distance(start: int, stop: int, first: int) -> jax.Array:
    """[1, Q, S], from a query of the block back to a key that it may see."""
    return (jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)[None, :])[None]


def blocks_forward(
    window, q_BKGTH, k_BKTH, v_BKTH, segment_BT, scale, rule: ScoreRule = PLAIN_SCORES
) -> tuple[jax.Array, jax.Array]:
    """The output [B, K, G, T, H], and the log-sum-exp [B, K, G, T] of every query's scores."""
    outs, lses = [], []
    for start, stop, first in blocks_of(segment_BT.shape[1], window):
        visible = _visible(segment_BT, start, stop, first, window)
        scores = rule(
            _scaled(q_BKGTH[:, :, :, start:stop], k_BKTH[:, :, first:stop], scale), _distance(start, stop, first)
        )
        scores = jnp.where(visible, scores, _HIDDEN)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = jnp.einsum(
            "bkgqs,bksh->bkgqh",
            weights.astype(v_BKTH.dtype),
            v_BKTH[:, :, first:stop],
            preferred_element_type=jnp.float32,
        )
        sees = (segment_BT[:, None, None, start:stop] != 0)[..., None]
        outs.append(jnp.where(sees, out / total, 0.0).astype(v_BKTH.dtype))
        lses.append((top + jnp.log(total))[..., 0])
    return jnp.concatenate(outs, axis=3), jnp.concatenate(lses, axis=3)


@functools.partial(CustomVjp, nondiff_argnums=(0, 1))
def _attend(window, rule, q_BKGTH, k_BKTH, v_BKTH, segment_BT, scale):
    return blocks_forward(window, q_BKGTH, k_BKTH, v_BKTH, segment_BT, scale, rule)[0]


def _attend_forward(window, rule, q_BKGTH, k_BKTH, v_BKTH, segment_BT, scale):
    out, lse = blocks_forward(window, q_BKGTH, k_BKTH, v_BKTH, segment_BT, scale, rule)
    out, lse = checkpoint_name(out, ATTENTION), checkpoint_name(lse, ATTENTION)
    return out, (q_BKGTH, k_BKTH, v_BKTH, segment_BT, scale, out, lse)


def _attend_backward(window, rule, kept, d_out_BKGTH):
    q, k, v, segment, scale, out, lse = kept
    return *blocks_backward(window, q, k, v, segment, scale, out, lse, d_out_BKGTH, rule), None, None


def blocks_backward(
    window,
    q_BKGTH,
    k_BKTH,
    v_BKTH,
    segment_BT,
    scale,
    out_BKGTH,
    lse_BKGT,
    d_out_BKGTH,
    rule: ScoreRule = PLAIN_SCORES,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of queries, keys and values, from what `blocks_forward` has returned."""
    delta_BKGT = jnp.sum(d_out_BKGTH.astype(jnp.float32) * out_BKGTH.astype(jnp.float32), axis=-1)
    dk, dv = (jnp.zeros(t.shape, jnp.float32) for t in (k_BKTH, v_BKTH))
    dqs = []
    for start, stop, first in blocks_of(segment_BT.shape[1], window):
        q, d_out = (t[:, :, :, start:stop] for t in (q_BKGTH, d_out_BKGTH))
        lse, delta = (t[:, :, :, start:stop, None] for t in (lse_BKGT, delta_BKGT))
        k, v = (t[:, :, first:stop] for t in (k_BKTH, v_BKTH))
        visible = _visible(segment_BT, start, stop, first, window)
        scaled = _scaled(q, k, scale)
        scores = jnp.where(visible, rule(scaled, _distance(start, stop, first)), _HIDDEN)
        weights = jnp.where(visible, jnp.exp(scores - lse), 0.0)
        f32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        dv = dv.at[:, :, first:stop].add(f32("bkgqs,bkgqh->bksh", weights.astype(d_out.dtype), d_out))
        d_weights = f32("bkgqh,bksh->bkgqs", d_out, v)
        d_scores = (weights * (d_weights - delta) * rule.derivative(scaled) * scale).astype(q.dtype)
        dqs.append(f32("bkgqs,bksh->bkgqh", d_scores, k).astype(q.dtype))
        dk = dk.at[:, :, first:stop].add(f32("bkgqs,bkgqh->bksh", d_scores, q))
    return jnp.concatenate(dqs, axis=3), dk.astype(k_BKTH.dtype), dv.astype(v_BKTH.dtype)


_attend.defvjp(_attend_forward, _attend_backward)
