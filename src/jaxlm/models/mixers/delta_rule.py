"""The gated delta rule over packed documents: in chunks for whole rows, step by step for generation.

A state S of each value head is decayed by e^g, and its value for the key k is moved towards v: S <- e^g S,
S <- S + beta k (v - k S), o = q S. A document begins with S = 0. Padding (segment 0) leaves S as it is, and returns 0.

Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks" (arXiv:2412.06464), equation 10; the form in chunks:
Yang et al. 2024 (arXiv:2406.06484), section 3.2.

Decays are sums over the tokens between two tokens, never differences of cumulative sums: one document with fast decay would
leave the others without digits. The triangular system is inverted by blocks: powers of its matrix, as in a Neumann series,
grow before they cancel if keys repeat.

Shapes: N chunks, B batch, T position, C tokens of a chunk (and I, J two of them), K key heads, R value heads per key head,
D key size, V value size. State and decays are float32. Products have operands in the dtype of the values and float32 sums.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxlm.core.tracing import CustomVjp

CHUNK = 64
_GROUP = 128  # chunks that are prepared together, and whose states at their start are in memory together
STATE = "state"
"""Checkpoint name of the states at the start of chunks, in remat policies."""


class State(NamedTuple):
    """What tokens have left for later ones.

    Attributes:
        memory: float32 [B, K, R, D, V].
        segment: int32 [B], the document that it is of: that of the last token which was no padding.
    """

    memory: jax.Array
    segment: jax.Array


class Tokens(NamedTuple):
    """What the rule reads of each token.

    Attributes:
        q, k: [B, T, K, D]; q is scaled already.
        v: [B, T, K, R, V].
        g, beta: float32 [B, T, K, R]; g <= 0.
        segments: int32 [B, T]; 0 is padding.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    segments: jax.Array


class _Chunk(NamedTuple):
    """One chunk, or several with an axis N in front.

    Attributes:
        q, k: [B, K, C, D].
        v: [B, K, R, C, V].
        scores: [B, K, R, I, J], q k^T with decays.
        solve: [B, K, R, I, J], the inverse of the triangular matrix times beta of token J.
        entering, leaving: [B, K, R, C], decay from the state before the chunk to each token, and from there to its end.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    scores: jax.Array
    solve: jax.Array
    entering: jax.Array
    leaving: jax.Array


def empty_state(batch: int, key_heads: int, group: int, key_size: int, value_size: int) -> State:
    """The state before the first token."""
    memory = jnp.zeros((batch, key_heads, group, key_size, value_size), jnp.float32)
    return State(memory, jnp.zeros((batch,), jnp.int32))


@jax.named_scope("delta_rule")
def delta_rule(tokens: Tokens, start: State | None = None) -> tuple[jax.Array, State]:
    """Applies the rule to tokens in the order of the text; returns the outputs [B, T, K, R, V] and the state after them.

    The backward pass saves the states at the start of chunks, or of groups of 128 chunks if there are more, and computes
    everything else again.

    Args:
        start: the state before them; None for that before the first token.
    """
    batch, length, key_heads, group, value_size = tokens.v.shape
    start = start or empty_state(batch, key_heads, group, tokens.k.shape[-1], value_size)
    if length == 1:
        return _one_token(tokens, start)
    out, memory = _rule(tokens, start)  # pyright: ignore[reportGeneralTypeIssues]
    return out, State(memory, last_segment(tokens.segments, start.segment))


def transition(tokens: Tokens, segment_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Describes what tokens do to any state S before them: S <- M S + B. Returns M [B, K, R, D, D] and B [B, K, R, D, V].

    Args:
        segment_B: the document of the state before them.
    """
    batch, _, key_heads, group, value_size = tokens.v.shape
    key_size = tokens.k.shape[-1]
    # The columns of a state are independent: those of the identity, without values, become M.
    wider = tokens._replace(v=jnp.pad(tokens.v, [(0, 0)] * 4 + [(0, key_size)]))
    zeros = jnp.zeros((batch, key_heads, group, key_size, value_size), jnp.float32)
    identity = jnp.broadcast_to(jnp.eye(key_size), (batch, key_heads, group, key_size, key_size))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk_forward(memory: jax.Array, chunk: _Chunk) -> tuple[jax.Array, None]:
        return _advanced(memory, chunk)[0], None

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def group_forward(memory: jax.Array, group: _Group) -> tuple[jax.Array, None]:
        return jax.lax.scan(chunk_forward, memory, _chunked(group))

    after, _ = jax.lax.scan(group_forward, jnp.concatenate([zeros, identity], axis=-1), _grouped(wider, segment_B))
    return after[..., value_size:], after[..., :value_size]


def last_segment(segments_BT: jax.Array, before_B: jax.Array) -> jax.Array:
    """The document of the last token that is not padding, [B]; `before_B` if there is none."""
    return filled(segments_BT, before_B)[:, -1]


def unit_vectors(x: jax.Array) -> jax.Array:
    """x / |x| over the last axis, in float32, with 1e-6 added to the square of the length."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _one_token(tokens: Tokens, start: State) -> tuple[jax.Array, State]:
    """The definition, in float32."""
    q_BKD, k_BKD, v_BKRV, g_BKR, beta_BKR = (array[:, 0].astype(jnp.float32) for array in tokens[:5])
    segment = tokens.segments[:, 0]
    is_token, continues = (flag[:, None, None, None, None] for flag in (segment != 0, segment == start.segment))
    decayed = jnp.where(continues, start.memory * jnp.exp(g_BKR)[..., None, None], 0)
    error_BKRV = v_BKRV - _exact_sum("bkd,bkrdv->bkrv", k_BKD, decayed)
    memory = decayed + _exact_sum("bkd,bkrv->bkrdv", k_BKD, beta_BKR[..., None] * error_BKRV)
    out_BKRV = _exact_sum("bkd,bkrdv->bkrv", q_BKD, memory)
    out = jnp.where(is_token[..., 0], out_BKRV, 0).astype(tokens.v.dtype)[:, None]
    return out, State(jnp.where(is_token, memory, start.memory), jnp.where(segment != 0, segment, start.segment))


_exact_sum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def filled(segments_BT: jax.Array, before_B: jax.Array) -> jax.Array:
    """Segments in which padding belongs to the document before it, so that it ends none."""
    extended = jnp.concatenate([before_B[:, None], segments_BT], axis=1)
    places = jnp.where(segments_BT != 0, jnp.arange(1, extended.shape[1]), 0)
    return jnp.take_along_axis(extended, jax.lax.cummax(places, axis=1), axis=1)


class _Group(NamedTuple):
    """Whole chunks as `Tokens`, [B, N C, ...], several with an axis in front. Padding belongs to the document before it.

    Attributes:
        before: int32 [B], the document of the token before the group.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    segments: jax.Array
    before: jax.Array


def _sizes(length: int) -> tuple[int, int, int]:
    """The numbers of groups, of chunks of a group, and of tokens of a chunk."""
    size = min(CHUNK, 1 << (length - 1).bit_length())
    count = -(-length // size)
    groups = -(-count // _GROUP)
    return groups, -(-count // groups), size


def _split(x: jax.Array, mode: str = "constant") -> jax.Array:
    """[B, T, ...] to [groups, B, tokens of a group, ...]. Args: mode: how `jnp.pad` fills up the last group."""
    batch, length, *rest = x.shape
    groups, count, size = _sizes(length)
    x = jnp.pad(x, [(0, 0), (0, groups * count * size - length)] + [(0, 0)] * len(rest), mode=mode)
    return jnp.moveaxis(x.reshape(batch, groups, count * size, *rest), 1, 0)


def _grouped(tokens: Tokens, before_B: jax.Array) -> _Group:
    """All groups. Args: before_B: the document of the state before the tokens."""
    is_token = (tokens.segments != 0)[..., None, None]
    g, beta = (jnp.where(is_token, array.astype(jnp.float32), 0) for array in (tokens.g, tokens.beta))
    # What fills up the last chunk belongs to the last document: otherwise it would end it.
    segments = _split(filled(tokens.segments, before_B), "edge")
    before = jnp.concatenate([before_B[None], segments[:-1, :, -1]])
    return _Group._make((*(_split(x) for x in (tokens.q, tokens.k, tokens.v, g, beta)), segments, before))


def _chunked(group: _Group) -> _Chunk:
    """The chunks of a group, [N, ...]."""
    size = min(CHUNK, group.q.shape[1])

    def split(x: jax.Array) -> jax.Array:
        """[B, N C, ...] to [N, B, C, ...]."""
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    s_NBC = split(group.segments)
    before_NB = jnp.concatenate([group.before[None], s_NBC[:-1, :, -1]])
    q, k = (split(x).transpose(0, 1, 3, 2, 4) for x in (group.q, group.k))
    v = split(group.v).transpose(0, 1, 3, 4, 2, 5)
    g, beta = (split(x).transpose(0, 1, 3, 4, 2) for x in (group.g, group.beta))
    decay, entering = _decays(g, s_NBC, before_NB)
    products = jnp.einsum("nbkid,nbkjd->nbkij", k, k, preferred_element_type=jnp.float32)
    scores = jnp.einsum("nbkid,nbkjd->nbkij", q, k, preferred_element_type=jnp.float32)
    below = jnp.tril(beta[..., None] * products[:, :, :, None] * decay, -1)
    solve = unit_lower_inverse(below) * beta[..., None, :]
    return _Chunk(q, k, v, scores[:, :, :, None] * decay, solve, entering, decay[..., -1, :])


def _decays(g_NBKRC: jax.Array, s_NBC: jax.Array, before_NB: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decay from token J to token I, and from the state before the chunk to token I; 0 from other documents."""
    lower = jnp.tril(jnp.ones((s_NBC.shape[-1],) * 2, jnp.float32))
    # Entry (l, j): g of token l, if it is behind token j.
    behind = g_NBKRC[..., None] * jnp.tril(lower, -1)
    between = jnp.einsum("il,nbkrlj->nbkrij", lower, behind, precision=jax.lax.Precision.HIGHEST)
    same = (s_NBC[..., :, None] == s_NBC[..., None, :]) & (lower > 0)
    first = (s_NBC == before_NB[..., None])[:, :, None, None]
    # Masked before the exponential: otherwise its derivative is infinity times zero.
    decay = jnp.exp(jnp.where(same[:, :, None, None], between, -jnp.inf))
    return decay, jnp.exp(jnp.where(first, jnp.cumsum(g_NBKRC, axis=-1), -jnp.inf))


def _forward(tokens: Tokens, start: State) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The outputs, the last state, and the states at the start of groups [groups, ...] and of chunks [groups, N, ...]."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk_forward(memory: jax.Array, chunk: _Chunk) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        after, out = _step(memory, chunk)
        return after, (out, memory)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def group_forward(memory: jax.Array, group: _Group):
        after, (out, starts) = jax.lax.scan(chunk_forward, memory, _chunked(group))
        return after, (out, memory, starts)

    memory, (out, first, starts) = jax.lax.scan(group_forward, start.memory, _grouped(tokens, start.segment))
    # From [groups, N, B, K, R, C, V].
    out = out.transpose(2, 0, 1, 5, 3, 4, 6).reshape(out.shape[2], -1, *tokens.v.shape[2:])[:, : tokens.v.shape[1]]
    return jnp.where((tokens.segments != 0)[..., None, None, None], out, 0), memory, first, starts


@CustomVjp
def _rule(tokens: Tokens, start: State) -> tuple[jax.Array, jax.Array]:
    """The outputs and the last state."""
    return _forward(tokens, start)[:2]


def _rule_forward(tokens: Tokens, start: State):
    out, memory, first, starts = _forward(tokens, start)
    saved = (None, starts) if starts.shape[0] == 1 else (first, None)
    return (out, memory), (tokens, start.segment, jax.tree.map(lambda x: checkpoint_name(x, STATE), saved))


def _rule_backward(residuals, cotangents):
    (tokens, before_B, saved), (d_out, d_memory) = residuals, cotangents
    d_out = jnp.where((tokens.segments != 0)[..., None, None, None], d_out, 0)
    groups, count, size = _sizes(d_out.shape[1])
    # To [groups, N, B, K, R, C, V].
    d_out = _split(d_out).reshape(groups, d_out.shape[0], count, size, *d_out.shape[2:]).transpose(0, 2, 1, 4, 5, 3, 6)

    def chunk_backward(d_memory, part):
        memory, chunk, d_out = part
        _, pullback = jax.vjp(_step, memory, chunk)
        return pullback((d_memory, d_out))

    def group_backward(d_memory, part):
        (first, starts), group, d_out = part
        prepare = lambda *arrays: _chunked(_Group._make((*arrays, group.segments, group.before)))  # noqa: E731
        chunks, pullback = jax.vjp(prepare, *group[:5])
        if starts is None:
            _, starts = jax.lax.scan(lambda memory, chunk: (_advanced(memory, chunk)[0], memory), first, chunks)
        d_memory, d_chunks = jax.lax.scan(chunk_backward, d_memory, (starts, chunks, d_out), reverse=True)
        return d_memory, pullback(d_chunks)

    grouped, ungroup = jax.vjp(
        lambda *arrays: _grouped(Tokens._make((*arrays, tokens.segments)), before_B)[:5], *tokens[:5]
    )
    group = _Group._make((*grouped, *_grouped(tokens, before_B)[5:]))
    d_memory, d_group = jax.lax.scan(group_backward, d_memory, (saved, group, d_out), reverse=True)
    return Tokens._make((*ungroup(d_group), None)), State._make((d_memory, None))


_rule.defvjp(_rule_forward, _rule_backward)


def _advanced(S_BKRDV: jax.Array, chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
    """The state after a chunk, and by how much its tokens change their values, [B, K, R, C, V]."""
    product = functools.partial(_product, chunk.v.dtype)
    recalled = chunk.entering[..., None] * product("bkcd,bkrdv->bkrcv", chunk.k, S_BKRDV)
    change = product("bkrij,bkrjv->bkriv", chunk.solve, chunk.v - recalled)
    added = product("bkcd,bkrcv->bkrdv", chunk.k, chunk.leaving[..., None] * change)
    return chunk.entering[..., -1, None, None] * S_BKRDV + added, change


def _step(S_BKRDV: jax.Array, chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
    """The state after a chunk and the outputs of its tokens, [B, K, R, C, V]."""
    product = functools.partial(_product, chunk.v.dtype)
    after, change = _advanced(S_BKRDV, chunk)
    out = chunk.entering[..., None] * product("bkcd,bkrdv->bkrcv", chunk.q, S_BKRDV)
    return after, (out + product("bkrij,bkrjv->bkriv", chunk.scores, change)).astype(chunk.v.dtype)


def _product(dtype, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32)


@jax.custom_jvp
def unit_lower_inverse(below: jax.Array) -> jax.Array:
    """The inverse of 1 + below, [..., C, C], for matrices with entries below the diagonal only; C is a power of 2.

    By blocks: the inverse of [[A, 0], [B, D]] is [[A', 0], [-D' B A', D']]. Tangents take two products, not these levels.
    """
    *leading, size, _ = below.shape
    inverse = jnp.ones((*leading, size, 1, 1), below.dtype)
    for level in range(int(math.log2(size))):
        half, count = 1 << level, size >> (level + 1)
        grid = below.reshape(*leading, count, 2 * half, count, 2 * half)
        on_diagonal = jnp.sum(jnp.where(jnp.eye(count, dtype=bool)[:, None, :, None], grid, 0), axis=-2)
        corner = on_diagonal[..., half:, :half]
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_exact(_exact(lower, corner), upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
    return inverse[..., 0, :, :]


@unit_lower_inverse.defjvp
def _inverse_tangent(primals, tangents):
    inverse = unit_lower_inverse(*primals)
    return inverse, -_exact(_exact(inverse, *tangents), inverse)


def _exact(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
