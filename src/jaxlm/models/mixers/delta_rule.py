"""The gated delta rule over packed documents: in chunks for whole rows, step by step for generation.

A state S of each value head is decayed by e^g, and its value for the key k is moved towards v: S <- e^g S,
S <- S + beta k (v - k S), o = q S. A document begins with S = 0. Padding (segment 0) leaves S as it is, and returns 0.

Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks" (arXiv:2412.06464), equation 10; the form in chunks:
Yang et al. 2024 (arXiv:2406.06484), section 3.2.

Decays are sums over the tokens between two tokens, never differences of cumulative sums: one document with fast decay would
leave the others without digits. The triangular system is inverted by blocks: powers of its matrix, as in a Neumann series,
grow before they cancel if keys repeat.

On GPUs, memory traffic decides: a product of a chunk reads and writes far more than it computes. So the loop over chunks has
only the recurrence (`_Chunk`: two products), and everything else is computed for all chunks of a group at once. A chunk's
update is `write` times errors, not keys times changes, which alternate in sign if keys repeat.

Shapes: N chunks, B batch, T position, C tokens of a chunk (and I, J two of them), K key heads, R value heads per key head,
D key size, V value size. State and decays are float32. Products have operands in the dtype of the values and float32 sums.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxlm.core.tracing import CustomVjp

CHUNK = 64
_GROUP = 128  # chunks that are prepared together, and whose states at their start are in memory together
STATE = "state"
"""Checkpoint name of what the backward pass reads of chunks or groups, in remat policies."""


class DeltaState(NamedTuple):
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
    """One chunk, or several with an axis N in front. H is B, K and R together, G is B and K.

    Tokens that miss their values by e = v - `entered(k)` S add `write` e to the decayed state, and `read` e to the outputs
    `entered(q)` S.

    Attributes:
        q, k: [G, C, D].
        v: [H, C, V].
        read: [H, C, C].
        write: [H, D, C].
        entering: float32 [H, C], decay from the state before the chunk to each token.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    read: jax.Array
    write: jax.Array
    entering: jax.Array

    def entered(self, x_GCD: jax.Array) -> jax.Array:
        """Queries or keys of value heads, [H, C, D], decayed from the state before the chunk."""
        return _decayed(self.entering, x_GCD)

    def error(self, S_HDV: jax.Array) -> jax.Array:
        """By how much values differ from what the state before the chunk has for their keys."""
        return (self.v - _product("...cd,...dv->...cv", self.entered(self.k), S_HDV)).astype(self.v.dtype)

    def decayed(self, S_HDV: jax.Array) -> jax.Array:
        """What is left of a state after the chunk; or its gradient before it, of that after it."""
        return self.entering[..., -1, None, None] * S_HDV


def _decayed(decay_HC: jax.Array, x_GCD: jax.Array) -> jax.Array:
    *leading, groups, size, features = x_GCD.shape
    decay = decay_HC.reshape(*leading, groups, -1, size, 1)
    return (decay * x_GCD[..., None, :, :]).astype(x_GCD.dtype).reshape(*leading, -1, size, features)


def empty_state(batch: int, key_heads: int, group: int, key_size: int, value_size: int) -> DeltaState:
    """The state before the first token."""
    memory = jnp.zeros((batch, key_heads, group, key_size, value_size), jnp.float32)
    return DeltaState(memory, jnp.zeros((batch,), jnp.int32))


@jax.named_scope("delta_rule")
def delta_rule(tokens: Tokens, start: DeltaState | None = None) -> tuple[jax.Array, DeltaState]:
    """Applies the rule to tokens in the order of the text; returns the outputs [B, T, K, R, V] and the state after them.

    The backward pass reads the states at the start of chunks and their errors, or the states at the start of groups of 128
    chunks if there are more, and computes everything else again.

    Args:
        start: the state before them; None for that before the first token.
    """
    batch, length, key_heads, group, value_size = tokens.v.shape
    start = start or empty_state(batch, key_heads, group, tokens.k.shape[-1], value_size)
    if length == 1:
        return _one_token(tokens, start)
    out, memory = _rule(tokens, start)  # pyright: ignore[reportGeneralTypeIssues]
    return out, DeltaState(memory, last_segment(tokens.segments, start.segment))


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
    def group_forward(memory: jax.Array, group: _Group) -> tuple[jax.Array, None]:
        return _run(memory, _chunked(group))[0], None

    after, _ = jax.lax.scan(group_forward, jnp.concatenate([zeros, identity], axis=-1), _grouped(wider, segment_B))
    return after[..., value_size:], after[..., :value_size]


def last_segment(segments_BT: jax.Array, before_B: jax.Array) -> jax.Array:
    """The document of the last token that is not padding, [B]; `before_B` if there is none."""
    return unpadded(segments_BT, before_B)[:, -1]


def unit_vectors(x: jax.Array) -> jax.Array:
    """x / |x| over the last axis, in float32, with 1e-6 added to the square of the length."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _one_token(tokens: Tokens, start: DeltaState) -> tuple[jax.Array, DeltaState]:
    """The definition, in float32."""
    q_BKD, k_BKD, v_BKRV, g_BKR, beta_BKR = (array[:, 0].astype(jnp.float32) for array in tokens[:5])
    segment = tokens.segments[:, 0]
    is_token, continues = (flag[:, None, None, None, None] for flag in (segment != 0, segment == start.segment))
    decayed = jnp.where(continues, start.memory * jnp.exp(g_BKR)[..., None, None], 0)
    error_BKRV = v_BKRV - _exact_sum("bkd,bkrdv->bkrv", k_BKD, decayed)
    memory = decayed + _exact_sum("bkd,bkrv->bkrdv", k_BKD, beta_BKR[..., None] * error_BKRV)
    out_BKRV = _exact_sum("bkd,bkrdv->bkrv", q_BKD, memory)
    out = jnp.where(is_token[..., 0], out_BKRV, 0).astype(tokens.v.dtype)[:, None]
    return out, DeltaState(jnp.where(is_token, memory, start.memory), jnp.where(segment != 0, segment, start.segment))


_exact_sum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def unpadded(segments_BT: jax.Array, before_B: jax.Array) -> jax.Array:
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
    segments = _split(unpadded(tokens.segments, before_B), "edge")
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
    products, scores = (jnp.einsum("nbkid,nbkjd->nbkij", x, k, preferred_element_type=jnp.float32) for x in (k, q))
    below = jnp.tril(beta[..., None] * products[:, :, :, None] * decay, -1)
    # The barrier: otherwise XLA computes the matrix again for each level of the inverse.
    solve = unit_lower_inverse(jax.lax.optimization_barrier(below)) * beta[..., None, :]
    merged = lambda x, count: x.reshape(x.shape[0], -1, *x.shape[count + 1 :])  # noqa: E731
    q, k = (merged(x, 2) for x in (q, k))
    v, scores, solve, entering, leaving = (
        merged(x, 3) for x in (v, scores[:, :, :, None] * decay, solve, entering, decay[..., -1, :])
    )
    read = _product("nhij,nhjl->nhil", scores.astype(v.dtype), solve)
    write = _product("nhjd,nhjl->nhdl", _decayed(leaving, k), solve)
    return _Chunk(q, k, v, read.astype(v.dtype), write.astype(v.dtype), entering)


def _decays(g_NBKRC: jax.Array, s_NBC: jax.Array, before_NB: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decay from token J to token I, and from the state before the chunk to token I; 0 from other documents."""
    place = jnp.arange(s_NBC.shape[-1])
    lower = place[:, None] >= place
    # Entry (l, i, j): whether token l is behind token j, and not behind token i.
    behind = (lower.T[:, :, None] & ~lower.T[:, None]).astype(jnp.float32)
    # The barrier: XLA for GPUs does not find tiles for this product together with what makes g, if R is 3.
    between = _exact_sum("nbkrl,lij->nbkrij", *jax.lax.optimization_barrier((g_NBKRC, behind)))
    same = (s_NBC[..., :, None] == s_NBC[..., None, :]) & lower
    first = (s_NBC == before_NB[..., None])[:, :, None, None]
    # Masked before the exponential: otherwise its derivative is infinity times zero.
    decay = jnp.exp(jnp.where(same[:, :, None, None], between, -jnp.inf))
    return decay, jnp.exp(jnp.where(first, between[..., 0] + g_NBKRC[..., :1], -jnp.inf))


def _run(memory: jax.Array, chunks: _Chunk) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The state after chunks; and, in the dtype of the values, those at their starts, [N, H, D, V], and errors, [N, H, C, V].

    Nothing else is in the loop, whose steps wait for each other.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(carry: tuple[jax.Array, jax.Array], chunk: _Chunk):
        memory, start = carry
        error = chunk.error(start)
        after = chunk.decayed(memory) + _product("hdc,hcv->hdv", chunk.write, error)
        return (after, after.astype(start.dtype)), (start, error)

    merged = memory.reshape(-1, *memory.shape[-2:])
    (after, _), of_chunks = jax.lax.scan(step, (merged, merged.astype(chunks.v.dtype)), chunks)
    return after.reshape(memory.shape), of_chunks


def _forward(tokens: Tokens, start: DeltaState) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """The outputs; the last state; the states at the start of groups, [groups, ...]; what `_run` returns of their chunks."""
    batch, length, *heads, value_size = tokens.v.shape

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def group_forward(memory: jax.Array, group: _Group):
        chunks = _chunked(group)
        after, (starts, errors) = _run(memory, chunks)
        out = _product("nhcd,nhdv->nhcv", chunks.entered(chunks.q), starts)
        out = out + _product("nhij,nhjv->nhiv", chunks.read, errors)
        return after, (out.astype(starts.dtype), memory, (starts, errors))

    memory, (out, first, of_chunks) = jax.lax.scan(group_forward, start.memory, _grouped(tokens, start.segment))
    out = out.reshape(*out.shape[:2], batch, *heads, -1, value_size)  # [groups, N, B, K, R, C, V]
    out = out.transpose(2, 0, 1, 5, 3, 4, 6).reshape(batch, -1, *heads, value_size)[:, :length]
    return jnp.where((tokens.segments != 0)[..., None, None, None], out, 0), memory, first, of_chunks


@CustomVjp
def _rule(tokens: Tokens, start: DeltaState) -> tuple[jax.Array, jax.Array]:
    """The outputs and the last state."""
    return _forward(tokens, start)[:2]


def _rule_forward(tokens: Tokens, start: DeltaState):
    out, memory, first, of_chunks = _forward(tokens, start)
    saved = (None, of_chunks) if first.shape[0] == 1 else (first, None)
    return (out, memory), (tokens, start.segment, jax.tree.map(lambda x: checkpoint_name(x, STATE), saved))


def _rule_backward(residuals, cotangents):
    (tokens, before_B, saved), (d_out, d_memory) = residuals, cotangents
    d_out = jnp.where((tokens.segments != 0)[..., None, None, None], d_out, 0)
    groups, count, size = _sizes(d_out.shape[1])
    d_out = _split(d_out).reshape(groups, d_out.shape[0], count, size, *d_out.shape[2:]).transpose(0, 2, 1, 4, 5, 3, 6)
    d_out = d_out.reshape(groups, count, -1, size, d_out.shape[-1])  # [groups, N, H, C, V]
    dtype = tokens.v.dtype

    def chunk_backward(carry, part):
        (d_memory, d_after, d_ends, d_errors), (n, chunk, d_out) = carry, part
        d_error = jax.lax.dynamic_index_in_dim(d_errors, n, keepdims=False)
        d_error = (d_error + _product("hdc,hdv->hcv", chunk.write, d_after)).astype(dtype)
        # One product, so that its result is written once.
        left = jnp.concatenate([chunk.entered(chunk.q), -chunk.entered(chunk.k)], axis=1)
        d_start = _product("hcd,hcv->hdv", left, jnp.concatenate([d_out, d_error], axis=1))
        d_memory = chunk.decayed(d_memory) + d_start
        d_ends = jax.lax.dynamic_update_index_in_dim(d_ends, d_after, n, axis=0)
        d_errors = jax.lax.dynamic_update_index_in_dim(d_errors, d_error, n, axis=0)
        return (d_memory, d_memory.astype(dtype), d_ends, d_errors), None

    def group_backward(d_memory, part):
        (first, of_chunks), group, d_out = part

        def prepare(*arrays):
            chunks = _chunked(_Group._make((*arrays, group.segments, group.before)))
            q, k = (chunks.entered(x) for x in (chunks.q, chunks.k))
            return (q, k, chunks.v, chunks.read, chunks.write, chunks.entering[..., -1]), chunks

        _, pullback, chunks = jax.vjp(prepare, *group[:5], has_aux=True)
        starts, errors = _run(first, chunks)[1] if of_chunks is None else of_chunks
        d_errors = _product("nhij,nhiv->nhjv", chunks.read, d_out).astype(dtype)
        merged = d_memory.reshape(starts.shape[1:])
        # In place, and not as outputs: XLA for GPUs would make the zeros that those begin with, for all layers, at once.
        zero, d_errors = jax.lax.optimization_barrier((jnp.zeros((), dtype), d_errors))
        carry = (merged, merged.astype(dtype), jnp.broadcast_to(zero, starts.shape), d_errors)
        carry, _ = jax.lax.scan(chunk_backward, carry, (jnp.arange(count), chunks, d_out), reverse=True)
        merged, _, d_ends, d_errors = carry
        pairs = ((d_out, starts), (-d_errors, starts), (d_out, errors), (d_ends, errors))
        d_q, d_k, d_read, d_write = (_product("nhiv,nhjv->nhij", x, y).astype(dtype) for x, y in pairs)
        d_kept = jnp.sum(d_ends.astype(jnp.float32) * starts.astype(jnp.float32), axis=(-2, -1))
        return merged.reshape(d_memory.shape), pullback((d_q, d_k, d_errors, d_read, d_write, d_kept))

    grouped, ungroup = jax.vjp(
        lambda *arrays: _grouped(Tokens._make((*arrays, tokens.segments)), before_B)[:5], *tokens[:5]
    )
    group = _Group._make((*grouped, *_grouped(tokens, before_B)[5:]))
    d_memory, d_group = jax.lax.scan(group_backward, d_memory, (saved, group, d_out), reverse=True)
    return Tokens._make((*ungroup(d_group), None)), DeltaState._make((d_memory, None))


_rule.defvjp(_rule_forward, _rule_backward)


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """A product of operands in the dtype of the first, with float32 sums."""
    return jnp.einsum(subscripts, x, y.astype(x.dtype), preferred_element_type=jnp.float32)


@jax.custom_jvp
def unit_lower_inverse(below: jax.Array) -> jax.Array:
    """The inverse of 1 + below, [..., C, C], for matrices with entries below the diagonal only; C is a power of 2.

    By blocks: the inverse of [[A, 0], [B, D]] is [[A', 0], [-D' B A', D']]. Tangents take two products, not these levels.
    """
    *_, size, _ = below.shape
    if size <= 2:
        return jnp.eye(size, dtype=below.dtype) - below
    half = size // 2
    blocks = jnp.stack([below[..., :half, :half], below[..., half:, half:]], axis=-3)
    upper, lower = jnp.moveaxis(unit_lower_inverse(blocks), -3, 0)
    corner = -_exact(_exact(lower, below[..., half:, :half]), upper)
    top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)


@unit_lower_inverse.defjvp
def _inverse_tangent(primals, tangents):
    inverse = unit_lower_inverse(*primals)
    return inverse, -_exact(_exact(inverse, *tangents), inverse)


def _exact(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
