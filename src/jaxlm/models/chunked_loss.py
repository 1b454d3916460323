"""Computes losses on logits that are never materialized for all tokens, with their gradient in the forward pass.

The logits of all tokens, [tokens, vocab] in float32, would be by far the largest array of a training step. Instead, a
scan runs over chunks of tokens. Each step computes the logits of its chunk, the loss and its gradient with respect to
the logits, and multiplies the latter into the gradients of the hidden states and the head. That takes three matrix
products with the head, as many as without chunks (`HeadProducts`); recomputing the logits in the backward pass would take
four. Only tokens are split, never the vocabulary, and the last chunk is padded, so the matrix products stay large.

On a mesh, each device processes its own tokens (`jax.shard_map`). The gradient of the head is reduced once, at the end,
and scattered to the parameter's sharding.

Source: the gradient is computed together with the loss, chunk by chunk, as in Liger Kernel (Hsu et al. 2024,
arXiv:2410.10989, section 3.2).

Shapes: B batch, S position, C tokens of a chunk, N chunks, D embed, V vocab (this device's shard of it).
"""

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax.sharding import PartitionSpec

from jaxlm.core.axes import BATCH, EMBED, POSITION, VOCAB
from jaxlm.core.devices import caches, rows_in_half
from jaxlm.core.products.matmul import arranged
from jaxlm.core.products.stored_weights import StoredArray, StoredWeight, Weight
from jaxlm.core.sharding import current_platform
from jaxlm.core.tracing import CustomVjp, trace_options
from jaxlm.models.head_products import HeadKind, HeadProducts, PlainHead, plain_head
from jaxlm.models.token_sharding import TokenSharding


@dataclass(frozen=True)
class ChunkedLoss(abc.ABC):
    """A loss as a function of the logits of a chunk of tokens. It is a static argument, so it must be hashable.

    Attributes:
        num_sums: number of sums that the loss computes. Only the first has a gradient.
        sharding: sharding of tokens and head.
        soft_cap: soft cap of the logits; None applies no cap.
        chunk_tokens: maximum number of tokens per chunk on one device.
        products: how the products with the head are computed.
    """

    num_sums: ClassVar[int]

    sharding: TokenSharding
    soft_cap: float | None
    chunk_tokens: int
    products: HeadKind = field(default=plain_head, kw_only=True)

    @abc.abstractmethod
    def of_chunk(
        self, logits_CV: jax.Array, columns: tuple[jax.Array, ...], heads: tuple[jax.Array | StoredArray, ...]
    ) -> tuple[tuple[jax.Array, ...], Callable[[], jax.Array]]:
        """The numbers of each token that are summed, float32 [C], and the gradient of the first sum with respect to the
        logits after the soft cap, float32 [C, V], by the loss mask. It is only called if it is needed.

        Args:
            columns: targets, the loss mask, and what else the loss reads of each token.
        """


def default_chunk_tokens(platform: str) -> int:
    """Tokens per chunk: large enough for efficient matrix products, small enough for the memory.

    On CPUs, the float32 logits of a chunk with a vocabulary of 8,192 take at most half of the last-level cache, which leaves
    the other half to the head and its gradient: 512 tokens for 32 MiB, or where the cache is unknown. Larger vocabularies
    have the same chunks, because products of fewer tokens would wait for the head. Elsewhere, 8192 tokens are 1.6 GB of
    logits for a vocabulary of 50k.
    """
    if platform != "cpu":
        return 8192
    cache = caches().last_level
    return 512 if cache is None else min(max(rows_in_half(cache, 4 * 8192), _MIN_CHUNK), _MAX_CHUNK)


_MIN_CHUNK, _MAX_CHUNK = 128, 2048


def chunk_or_default(chunk_tokens: int | None) -> int:
    """The given number of tokens per chunk, else that of the trace options, else the default for the current platform.
    Raises `ValueError` below 1.
    """
    if chunk_tokens is None:
        chunk_tokens = trace_options().block_sizes.loss_chunk_tokens
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: {chunk_tokens} given, 1 or more expected")
    return default_chunk_tokens(current_platform()) if chunk_tokens is None else chunk_tokens


def hidden_and_head(
    hidden: NamedArray, head: Weight | None, sharding: TokenSharding
) -> tuple[jax.Array, jax.Array | StoredArray | None]:
    """x_BSD and w_VD, with the padding rows of the sharding; without a head, the logits and None."""
    if head is None:
        return hidden.rearrange((BATCH, POSITION, VOCAB)).array, None
    return hidden.rearrange((BATCH, POSITION, EMBED)).array, sharding.pad_vocab(arranged(head, (VOCAB, EMBED)))


# --- One chunk --------------------------------------------------------------------------------------------------------


def chunked(arrays: tuple[jax.Array, ...], chunk_tokens: int) -> tuple[tuple[jax.Array, ...], int]:
    """Reshapes [batch, position, ...] arrays to [N, C, ...], padded with zeros; also returns the number of tokens."""
    num_tokens = arrays[0].shape[0] * arrays[0].shape[1]
    num_chunks = -(-num_tokens // chunk_tokens)
    size = -(-num_tokens // num_chunks)
    padding = num_chunks * size - num_tokens

    def to_chunks(a):
        flat = a.reshape(num_tokens, *a.shape[2:])
        if padding:
            flat = jnp.pad(flat, ((0, padding),) + ((0, 0),) * (flat.ndim - 1))
        return flat.reshape(num_chunks, size, *flat.shape[1:])

    return tuple(map(to_chunks, arrays)), num_tokens


def soft_capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """cap * tanh(logits / cap); without a cap, the logits."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def checked_cap(soft_cap: float | None) -> float | None:
    """The soft cap. Raises `ValueError` if it is not above 0."""
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: {soft_cap} given, more than 0 or None expected")
    return soft_cap


# So low that its exponential is 0 beside any other logit. Finite, because infinities have undefined differences.
_NEVER = -1e9


def logits_of(
    x_CD: jax.Array,
    head: jax.Array | StoredArray | HeadProducts | None,
    soft_cap: float | None,
    sharding: TokenSharding,
) -> jax.Array:
    """The float32 logits of a chunk. Padding rows of the head have a probability of 0."""
    if head is None:
        return soft_capped(x_CD.astype(jnp.float32), soft_cap)
    products = head if isinstance(head, HeadProducts) else PlainHead(head)
    logits_CV = soft_capped(products.logits(x_CD), soft_cap)
    return sharding.fill_padding(logits_CV, _NEVER)


def without_tokens(logits_CV: jax.Array, excluded: Sequence[jax.Array], sharding: TokenSharding) -> jax.Array:
    """The logits where some tokens have a probability of 0. Args: excluded: int [C] arrays, a token of each position."""
    for token_C in excluded:
        logits_CV = jnp.where(is_token(token_C, logits_CV.shape[1], sharding), _NEVER, logits_CV)
    return logits_CV


def is_token(token_C: jax.Array, num_local: int, sharding: TokenSharding) -> jax.Array:
    """bool [C, V]: which of this device's `num_local` tokens is the given one."""
    ids_C = sharding.local_ids(token_C, num_local)
    return ids_C[:, None] == jnp.arange(num_local, dtype=ids_C.dtype)


def local_logits(logits_CV: jax.Array, num_local: int, sharding: TokenSharding) -> jax.Array:
    """This device's shard of the logits of the whole vocabulary, with its padding."""
    if not sharding.vocab_axes and num_local == logits_CV.shape[1]:
        return logits_CV
    padding = sharding.padded_vocab_size - logits_CV.shape[1]
    padded = jnp.pad(logits_CV, ((0, 0), (0, padding)), constant_values=_NEVER)
    return jax.lax.dynamic_slice_in_dim(padded, sharding.first_id(num_local), num_local, axis=1)


def logsumexp(logits_CV: jax.Array, sharding: TokenSharding) -> jax.Array:
    """[C]: log of the sum over the vocabulary of exp(logits)."""
    return _summary(logits_CV, sharding)[0]


def _summary(logits_CV: jax.Array, sharding: TokenSharding) -> tuple[jax.Array, jax.Array]:
    """`lse_C` and `first_C` of `ChunkLogits`. GPUs take longer to read logits than to compute with them: they read once."""
    num_local = logits_CV.shape[1]
    # jax loses the derivative of `online_maximum` when it differentiates a loop that it has differentiated before.
    if current_platform() == "gpu" and not trace_options().twice_differentiable:
        local_top_C, local_sum_C, local_first_C = online_maximum(logits_CV)
        local_top_C = jax.lax.stop_gradient(local_top_C)
        top_C = sharding.max_vocab(local_top_C)
        sum_C = sharding.sum_vocab(local_sum_C * jnp.exp(local_top_C - top_C))
        return top_C + jnp.log(sum_C), jnp.where(local_top_C == top_C, local_first_C, num_local)
    top_C = jax.lax.stop_gradient(sharding.max_vocab(jnp.max(logits_CV, axis=1)))
    sum_C = sharding.sum_vocab(jnp.sum(jnp.exp(logits_CV - top_C[:, None]), axis=1))
    index_V = jnp.arange(num_local, dtype=jnp.int32)
    first_C = jnp.where(logits_CV == top_C[:, None], index_V, num_local).min(axis=1)
    return top_C + jnp.log(sum_C), first_C


@jax.custom_jvp
def online_maximum(logits_CV: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The maximum, the sum of exp(logits - maximum), and the first index of the maximum, [C] each, in one pass.

    The derivative is that of the sum, for a constant maximum, as `_summary` needs it. Source: online softmax (Milakov
    and Gimelshein 2018, arXiv:1805.02867, algorithm 3).
    """

    def combined(a, b):
        (top_a, sum_a, index_a), (top_b, sum_b, index_b) = a, b
        top = jnp.maximum(top_a, top_b)
        # Where both are infinite, their difference is undefined, and the factor is 1.
        factor_a, factor_b = (jnp.where(part == top, 1.0, jnp.exp(part - top)) for part in (top_a, top_b))
        first = jnp.where(top_a > top_b, index_a, jnp.where(top_b > top_a, index_b, jnp.minimum(index_a, index_b)))
        return top, sum_a * factor_a + sum_b * factor_b, first

    num_vocab = logits_CV.shape[1]
    index_CV = jnp.broadcast_to(jnp.arange(num_vocab, dtype=jnp.int32), logits_CV.shape)
    start = (jnp.float32(-jnp.inf), jnp.float32(0), jnp.int32(num_vocab))
    return jax.lax.reduce((logits_CV, jnp.ones_like(logits_CV), index_CV), start, combined, dimensions=(1,))


@online_maximum.defjvp  # type: ignore[arg-type]  # float0, the tangent of integers, is not a jax.Array
def _online_maximum_jvp(primals, tangents):
    (logits_CV,), (tangent_CV,) = primals, tangents
    top_C, sum_C, index_C = online_maximum(logits_CV)
    sum_tangent_C = jnp.sum(jnp.exp(logits_CV - top_C[:, None]) * tangent_CV, axis=1)
    no_tangent = np.zeros(index_C.shape, jax.dtypes.float0)
    return (top_C, sum_C, index_C), (jnp.zeros_like(top_C), sum_tangent_C, no_tangent)


class ChunkLogits(NamedTuple):
    """The logits of a chunk of tokens, and the targets. Its methods return a number for each token, [C].

    Attributes:
        lse_C: log of the sum over the vocabulary of exp(logits).
        first_C: int32, the first index of the largest logit in this shard of the vocabulary; the size of the shard if the
            largest logit is in another.
    """

    logits_CV: jax.Array
    lse_C: jax.Array
    first_C: jax.Array
    y_C: jax.Array
    sharding: TokenSharding

    @staticmethod
    def of(logits_CV: jax.Array, y_C: jax.Array, sharding: TokenSharding) -> "ChunkLogits":
        return ChunkLogits(logits_CV, *_summary(logits_CV, sharding), y_C, sharding)

    def nats(self) -> jax.Array:
        """Negative log-likelihood of the target; NaN if the target is outside the vocabulary."""
        num_local, sum_vocab = self.logits_CV.shape[1], self.sharding.sum_vocab
        ids = self.sharding.local_ids(self.y_C, num_local)
        is_local = (ids >= 0) & (ids < num_local) & (self.y_C < self.sharding.vocab_size)
        local_logit = jnp.take_along_axis(self.logits_CV, jnp.clip(ids, 0, num_local - 1)[:, None], axis=1)[:, 0]
        num_owners = sum_vocab(is_local.astype(jnp.float32))
        target_C = jnp.where(num_owners > 0, sum_vocab(jnp.where(is_local, local_logit, 0.0)), jnp.nan)
        return self.lse_C - target_C

    def entropy(self) -> jax.Array:
        """Entropy of the distribution in nats."""
        p_CV = self.softmax()
        # jnp.where, because a logit may be -inf, and 0 times infinity is NaN, in the gradient too.
        products_CV = p_CV * jnp.where(p_CV > 0, self.logits_CV, 0.0)
        return self.lse_C - self.sharding.sum_vocab(jnp.sum(products_CV, axis=1))

    def collision_entropy(self) -> jax.Array:
        """Minus the log of the sum of the squared probabilities (Rényi entropy of order 2)."""
        return 2 * self.lse_C - logsumexp(2 * self.logits_CV, self.sharding)

    def predicts(self, ids_C: jax.Array) -> jax.Array:
        """Tells whether greedy decoding would pick a token."""
        num_local, sum_vocab = self.logits_CV.shape[1], self.sharding.sum_vocab
        ids = self.sharding.local_ids(ids_C, num_local)
        # A maximum before the token wins: in this shard, or anywhere in an earlier shard. One in a later shard does not.
        has_earlier = (self.first_C < num_local) & (self.first_C < ids)
        is_maximum = (self.first_C == ids) & (ids < num_local)
        return (sum_vocab(is_maximum.astype(jnp.int32)) > 0) & (sum_vocab(has_earlier.astype(jnp.int32)) == 0)

    def softmax(self) -> jax.Array:
        """[C, V]."""
        return jnp.exp(self.logits_CV - self.lse_C[:, None])

    def is_target(self) -> jax.Array:
        """bool [C, V]."""
        return is_token(self.y_C, self.logits_CV.shape[1], self.sharding)

    def constant(self) -> "ChunkLogits":
        """The same logits without a gradient."""
        return self._replace(logits_CV=jax.lax.stop_gradient(self.logits_CV), lse_C=jax.lax.stop_gradient(self.lse_C))


def _masked_sums(values: tuple[jax.Array, ...], m_C: jax.Array) -> jax.Array:
    """The sum of each [C] array, weighted by the loss mask."""
    # jnp.where, because a masked target may be outside the vocabulary, and NaN times 0 is NaN.
    return jnp.stack([jnp.sum(jnp.where(m_C == 0, 0.0, m_C * a)) for a in values])


# --- All chunks -------------------------------------------------------------------------------------------------------


class _Needed(NamedTuple):
    """Says which gradients are needed."""

    hidden: bool
    head: bool


class _Gradients(NamedTuple):
    """Gradients saved by the forward pass, or their partition specs; None if not needed."""

    hidden: Any
    head: Any


def chunked_loss(
    loss: ChunkedLoss,
    hidden: NamedArray,
    head: Weight | None,
    targets: NamedArray,
    loss_mask: NamedArray,
    columns: tuple[jax.Array, ...] = (),
    heads: tuple[jax.Array | StoredArray, ...] = (),
) -> tuple[jax.Array, ...]:
    """The sums of a loss over all tokens, float32 scalars. Only the first has a gradient, for `hidden` and `head`.

    Args:
        columns: what the loss reads of each token besides its logits, target and mask, [B, S, ...].
        heads: [V, D] arrays that the loss reads besides, sharded like the head.
    """
    if isinstance(head, StoredWeight):
        head = head.floats(hidden.dtype)  # the backward pass is for arrays
    y_BS, m_BS = (column.rearrange((BATCH, POSITION)).array for column in (targets, loss_mask))
    m_BS = jax.lax.stop_gradient(m_BS.astype(jnp.float32))
    x_BSD, w_VD = hidden_and_head(hidden, head, loss.sharding)
    first, rest = _run(loss, x_BSD, w_VD, (y_BS, m_BS, *columns), heads)  # type: ignore[misc]
    return first, *map(jax.lax.stop_gradient, rest)


def map_chunks(
    function: Callable[[jax.Array, tuple[jax.Array, ...]], Any],
    hidden: NamedArray,
    head: Weight | None,
    columns: tuple[jax.Array, ...],
    sharding: TokenSharding,
    soft_cap: float | None,
    chunk_tokens: int | None,
) -> Any:
    """Numbers of each token from its logits, [B, S, ...] arrays.

    Supports any cotangent, because the backward pass recomputes the logits of each chunk.

    Args:
        function: from the logits of a chunk and what else it reads of its tokens to [C, ...] arrays.
        columns: what it reads, [B, S].
    """
    x_BSD, w_VD = hidden_and_head(hidden, head, sharding)
    size, cap = chunk_or_default(chunk_tokens), checked_cap(soft_cap)

    def local(x_BSD, w_VD, *columns):
        chunks, num_tokens = chunked((x_BSD, *columns), size)

        @jax.checkpoint
        def one_chunk(_, chunk):
            x_CD, *columns = chunk
            return None, function(logits_of(x_CD, w_VD, cap, sharding), tuple(columns))

        _, values = jax.lax.scan(one_chunk, None, chunks)
        in_rows = lambda a: a.reshape(-1, *a.shape[2:])[:num_tokens].reshape(*x_BSD.shape[:2], *a.shape[2:])  # noqa: E731
        return jax.tree.map(in_rows, values)

    in_specs = (sharding.tokens(1), sharding.head, *(sharding.tokens() for _ in columns))
    return sharding.shard_map(local, in_specs, sharding.tokens())(x_BSD, w_VD, *columns)


def _scan_chunks(loss: ChunkedLoss, needed: _Needed, x_BSD, w_VD, columns, heads):
    """The sums over all tokens and the needed gradients, in one scan over this device's chunks."""
    chunks, num_tokens = chunked((x_BSD, *columns), loss.chunk_tokens)
    products = None if w_VD is None else loss.products(x_BSD, w_VD, columns, loss.sharding)

    def one_chunk(carry, chunk):
        sums, dw_VD = carry
        x_CD, *columns = chunk
        logits_CV = logits_of(x_CD, products, loss.soft_cap, loss.sharding)
        numbers, gradient = loss.of_chunk(logits_CV, tuple(columns), heads)
        dx_CD = None
        if needed.hidden or needed.head:
            dtype = x_CD.dtype if w_VD is None else w_VD.dtype  # of the following matrix products
            gradient_CV = gradient()
            if loss.soft_cap is not None:  # the derivative of the cap in terms of its output
                gradient_CV *= 1 - (logits_CV / loss.soft_cap) ** 2
            dlogits_CV = loss.sharding.fill_padding(gradient_CV, 0.0).astype(dtype)
        if needed.hidden and products is not None:
            dx_CD = loss.sharding.sum_vocab(products.hidden_gradient(dlogits_CV)).astype(x_CD.dtype)
        elif needed.hidden:
            dx_CD = dlogits_CV
        if needed.head and products is not None:
            dw_VD += products.head_gradient(dlogits_CV, x_CD)
        return (sums + _masked_sums(numbers, columns[1]), dw_VD), dx_CD

    if trace_options().twice_differentiable:  # the loop itself is differentiated, and must not save all logits
        one_chunk = jax.checkpoint(one_chunk)
    start = (
        jnp.zeros(loss.num_sums, jnp.float32),
        jnp.zeros(w_VD.shape, jnp.float32) if needed.head and w_VD is not None else None,
    )
    (sums, dw_VD), dx_NCD = jax.lax.scan(one_chunk, start, chunks)
    dx_BSD = None if dx_NCD is None else dx_NCD.reshape(-1, x_BSD.shape[-1])[:num_tokens].reshape(x_BSD.shape)
    if dw_VD is not None:
        dw_VD = loss.sharding.reduce_head_gradient(dw_VD)
    return loss.sharding.sum_tokens(sums), _Gradients(dx_BSD, dw_VD)


def _sums_and_gradients(loss: ChunkedLoss, needed: _Needed, x_BSD, w_VD, columns, heads):
    sharding = loss.sharding
    token_specs = tuple(sharding.tokens(column.ndim - 2) for column in columns)
    in_specs = (sharding.tokens(1), sharding.head, token_specs, (sharding.head,) * len(heads))
    out_specs = (
        PartitionSpec(),
        _Gradients(sharding.tokens(1) if needed.hidden else None, sharding.head_at_rest if needed.head else None),
    )
    run = sharding.shard_map(functools.partial(_scan_chunks, loss, needed), in_specs, out_specs)
    sums, gradients = run(x_BSD, w_VD, columns, heads)
    return (sums[0], tuple(sums[number] for number in range(1, loss.num_sums))), gradients


@functools.partial(CustomVjp, nondiff_argnums=(0,))
def _run(loss: ChunkedLoss, x_BSD, w_VD, columns, heads) -> Any:
    return _sums_and_gradients(loss, _Needed(False, False), x_BSD, w_VD, columns, heads)[0]


def _run_forward(loss: ChunkedLoss, x, w, columns, heads):
    head = None if w is None else w.value
    needed = _Needed(x.perturbed, w is not None and w.perturbed)
    columns, heads = (tuple(entry.value for entry in group) for group in (columns, heads))
    out, gradients = _sums_and_gradients(loss, needed, x.value, head, columns, heads)
    # The gradient of the head is float32. An empty array passes the head's dtype to the backward pass.
    return out, (gradients, None if head is None else jnp.empty(0, head.dtype))


def _run_backward(loss: ChunkedLoss, residuals, cotangents):
    gradients, head_like = residuals
    d_total = cotangents[0]
    if isinstance(d_total, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None
    d_hidden = None if gradients.hidden is None else (d_total * gradients.hidden).astype(gradients.hidden.dtype)
    d_head = None if gradients.head is None else (d_total * gradients.head).astype(head_like.dtype)
    return d_hidden, d_head, None, None


_run.defvjp(_run_forward, _run_backward, symbolic_zeros=True)
