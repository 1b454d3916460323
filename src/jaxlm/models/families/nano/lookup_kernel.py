"""Attention of each token to its own entries of a table: softmax(scale K_t q) V_t, where K_t are the entries of token t.

Padding every token to the most entries that a token has would copy the table many times over. Instead, tokens are sorted by
their number of entries and processed in chunks. A loop over blocks of entries, with an online softmax, ends with the chunk's
largest number of entries, so that little is read in vain, and at most chunk x block rows of the table are gathered at a time.
The backward pass gathers them again, and adds their gradients into one array of the size of the table.

Source: online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3); recomputation from the saved logarithm of
the sum as in FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithm 4).

Shapes: N tokens, C tokens of a chunk, E entries of a block, M entries of the table, D embed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxlm.core.sharding import current_platform
from jaxlm.core.tracing import CustomVjp, trace_options
from jaxlm.models.attention.backends.blockwise import ATTENTION

_BLOCK = 16  # entries
_NEVER = -1e30  # so low that its exponential is 0. Finite, because infinities have undefined differences


class Scores(NamedTuple):
    """How queries and keys are compared. Static.

    Attributes:
        scale: factor of the scores.
        key_epsilon: added to the mean square of a key when it is normalized; None does not normalize keys.
        max_entries: the most entries that a token has.
    """

    scale: float
    key_epsilon: float | None
    max_entries: int

    def of(self, q_CD: jax.Array, k_CED: jax.Array) -> jax.Array:
        """The scores, float32 [C, E]."""
        k_CED = k_CED.astype(jnp.float32)
        if self.key_epsilon is not None:
            k_CED = k_CED * jax.lax.rsqrt(jnp.mean(jnp.square(k_CED), -1, keepdims=True) + self.key_epsilon)
        return self.scale * jnp.einsum("cd,ced->ce", q_CD.astype(jnp.float32), k_CED)


class _Sorted(NamedTuple):
    """Tokens in chunks, sorted by their number of entries.

    Attributes:
        order: [N], the number of the token at each place.
        first, count: [chunks, C], the first entry of each token, and how many it has; 0 for padding.
    """

    order: jax.Array
    first: jax.Array
    count: jax.Array

    @staticmethod
    def of(ids_N: jax.Array, bounds: jax.Array, chunk: int) -> "_Sorted":
        first, count = bounds[ids_N], bounds[ids_N + 1] - bounds[ids_N]
        numbers = jnp.arange(ids_N.size, dtype=jnp.int32)
        # By id too, so that tokens that read the same entries are neighbors.
        count, _, order = jax.lax.sort((count, ids_N, numbers), num_keys=2)
        return _Sorted(order, _chunks(first[order], chunk), _chunks(count, chunk))

    def chunks(self, x_ND: jax.Array) -> jax.Array:
        """[chunks, C, ...]: one array of the tokens, in this order."""
        return _chunks(x_ND[self.order], self.first.shape[1])

    def unsorted(self, chunks: jax.Array) -> jax.Array:
        """[N, ...]: the inverse of `chunks`."""
        size = self.order.size
        flat = chunks.reshape(-1, *chunks.shape[2:])[:size]
        return jnp.zeros_like(flat).at[self.order].set(flat, unique_indices=True)


def _chunks(x: jax.Array, chunk: int) -> jax.Array:
    padding = -x.shape[0] % chunk
    return jnp.pad(x, ((0, padding), *[(0, 0)] * (x.ndim - 1))).reshape(-1, chunk, *x.shape[1:])


def _chunk_tokens(num_tokens: int) -> int:
    """Tokens of a chunk: enough for the device, and no more than there are."""
    return min(num_tokens, 256 if current_platform() == "cpu" else 4096)


def _num_blocks(count_C: jax.Array) -> jax.Array:
    return (jnp.max(count_C) + _BLOCK - 1) // _BLOCK


def _entries(block: jax.Array | int, first_C: jax.Array, count_C: jax.Array, num_entries: int) -> jax.Array:
    """int32 [C, E]: the entries of a block; `num_entries`, which is past the end, where a token has no more."""
    offset_E = block * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
    return jnp.where(offset_E < count_C[:, None], first_C[:, None] + offset_E, num_entries)


def _rows(table_MD: jax.Array, entry_CE: jax.Array) -> jax.Array:
    return table_MD.at[entry_CE].get(mode="clip")


@functools.partial(CustomVjp, nondiff_argnums=(0,))
def attend_to_entries(
    scores: Scores,
    q_ND: jax.Array,
    ids_N: jax.Array,
    bounds: jax.Array,
    keys_MD: jax.Array,
    values_MD: jax.Array | None,
) -> jax.Array:
    """[N, D]: for each token, the values of its entries, weighted by the softmax of its scores; 0 if it has none.

    Args:
        bounds: int32 [vocab + 1], where the entries of each token begin, and where the last ones end.
        values_MD: None if the keys are the values too.
    """
    if trace_options().twice_differentiable:
        return _plain(scores, q_ND, ids_N, bounds, keys_MD, keys_MD if values_MD is None else values_MD)
    return _forward(scores, q_ND, ids_N, bounds, keys_MD, values_MD)[0]


def _plain(scores: Scores, q_ND, ids_N, bounds, keys_MD, values_MD) -> jax.Array:
    """The definition, with every token padded to the most entries, in chunks as large as the kernel's."""
    size = max(1, _chunk_tokens(len(ids_N)) * _BLOCK // scores.max_entries)

    @jax.checkpoint
    def chunk(tokens: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_CD, first_C, count_C = tokens
        offset_K = jnp.arange(scores.max_entries, dtype=jnp.int32)
        inside_CK = offset_K < count_C[:, None]
        entry_CK = jnp.where(inside_CK, first_C[:, None] + offset_K, 0)
        score_CK = jnp.where(inside_CK, scores.of(q_CD, keys_MD[entry_CK]), _NEVER)
        weight_CK = jnp.where(inside_CK, jax.nn.softmax(score_CK), 0.0)
        return jnp.einsum("ck,ckd->cd", weight_CK, values_MD[entry_CK].astype(jnp.float32)).astype(q_CD.dtype)

    first, count = bounds[ids_N], bounds[ids_N + 1] - bounds[ids_N]
    out = jax.lax.map(chunk, tuple(_chunks(part, size) for part in (q_ND, first, count)))
    return out.reshape(-1, q_ND.shape[1])[: len(ids_N)]


def _forward(scores: Scores, q_ND, ids_N, bounds, keys_MD, values_MD):
    tokens, num_entries = _Sorted.of(ids_N, bounds, _chunk_tokens(len(ids_N))), len(keys_MD)

    def chunk(arrays: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q_CD, first_C, count_C = arrays

        def step(block: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
            top_C, sum_C, out_CD = carry
            entry_CE = _entries(block, first_C, count_C, num_entries)
            inside_CE, k_CED = entry_CE < num_entries, _rows(keys_MD, entry_CE)
            score_CE = jnp.where(inside_CE, scores.of(q_CD, k_CED), _NEVER)
            new_top_C = jnp.maximum(top_C, score_CE.max(axis=1))
            weight_CE = jnp.where(inside_CE, jnp.exp(score_CE - new_top_C[:, None]), 0.0)
            before_C = jnp.exp(top_C - new_top_C)
            v_CED = k_CED if values_MD is None else _rows(values_MD, entry_CE)
            read_CD = jnp.einsum("ce,ced->cd", weight_CE, v_CED.astype(jnp.float32))
            return new_top_C, sum_C * before_C + weight_CE.sum(axis=1), out_CD * before_C[:, None] + read_CD

        start = jnp.full(q_CD.shape[:1], _NEVER), jnp.zeros(q_CD.shape[:1]), jnp.zeros(q_CD.shape)
        top_C, sum_C, out_CD = jax.lax.fori_loop(0, _num_blocks(count_C), step, start)
        sum_C = jnp.where(count_C > 0, sum_C, 1.0)
        return (out_CD / sum_C[:, None]).astype(q_CD.dtype), top_C + jnp.log(sum_C)

    out, lse = jax.lax.map(chunk, (tokens.chunks(q_ND), tokens.first, tokens.count))
    out_ND, lse_N = (checkpoint_name(tokens.unsorted(part), ATTENTION) for part in (out, lse))
    return out_ND, (q_ND, ids_N, bounds, keys_MD, values_MD, out_ND, lse_N)


def _backward(scores: Scores, residuals, d_out_ND: jax.Array):
    q_ND, ids_N, bounds, keys_MD, values_MD, out_ND, lse_N = residuals
    tokens, num_entries = _Sorted.of(ids_N, bounds, _chunk_tokens(len(ids_N))), len(keys_MD)
    delta_N = jnp.sum(d_out_ND.astype(jnp.float32) * out_ND.astype(jnp.float32), axis=1)

    def chunk(tables: tuple[jax.Array, jax.Array | None], arrays: tuple[jax.Array, ...]):
        q_CD, d_out_CD, lse_C, delta_C, first_C, count_C = arrays

        def step(block: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array | None]):
            d_q_CD, d_keys_MD, d_values_MD = carry
            entry_CE = _entries(block, first_C, count_C, num_entries)
            k_CED = _rows(keys_MD, entry_CE).astype(jnp.float32)
            v_CED = k_CED if values_MD is None else _rows(values_MD, entry_CE).astype(jnp.float32)
            score_CE, pull = jax.vjp(scores.of, q_CD, k_CED)
            weight_CE = jnp.where(entry_CE < num_entries, jnp.exp(score_CE - lse_C[:, None]), 0.0)
            d_weight_CE = jnp.einsum("cd,ced->ce", d_out_CD, v_CED)
            d_q, d_k_CED = pull(weight_CE * (d_weight_CE - delta_C[:, None]))
            d_v_CED = weight_CE[..., None] * d_out_CD[:, None]
            if d_values_MD is None:
                d_k_CED = d_k_CED + d_v_CED
            else:
                d_values_MD = d_values_MD.at[entry_CE].add(d_v_CED, mode="drop")
            return d_q_CD + d_q, d_keys_MD.at[entry_CE].add(d_k_CED, mode="drop"), d_values_MD

        # In float32, so that the sums over blocks and tokens are not rounded after each.
        q_CD, d_out_CD = q_CD.astype(jnp.float32), d_out_CD.astype(jnp.float32)
        start = (jnp.zeros_like(q_CD), *tables)
        d_q_CD, d_keys_MD, d_values_MD = jax.lax.fori_loop(0, _num_blocks(count_C), step, start)
        return (d_keys_MD, d_values_MD), d_q_CD.astype(q_ND.dtype)

    columns = (*map(tokens.chunks, (q_ND, d_out_ND, lse_N, delta_N)), tokens.first, tokens.count)
    f32 = functools.partial(jnp.zeros, dtype=jnp.float32)
    empty = f32(keys_MD.shape), None if values_MD is None else f32(values_MD.shape)
    (d_keys_MD, d_values_MD), d_q = jax.lax.scan(chunk, empty, columns)
    d_values_MD = None if values_MD is None or d_values_MD is None else d_values_MD.astype(values_MD.dtype)
    return tokens.unsorted(d_q), None, None, d_keys_MD.astype(keys_MD.dtype), d_values_MD


attend_to_entries.defvjp(_forward, _backward)
