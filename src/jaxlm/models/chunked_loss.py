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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax.sharding import PartitionSpec

from jaxlm.core.axes import BATCH, EMBED, POSITION, VOCAB
from jaxlm.core.devices import caches, rows_in_half
from jaxlm.core.products.fp8 import Fp8, Scaled, scaled_product, to_fp8
from jaxlm.core.products.matmul import arranged, einsum
from jaxlm.core.products.stored_weights import StoredArray, Weight
from jaxlm.core.sharding import current_platform
from jaxlm.core.tracing import CustomVjp, trace_options
from jaxlm.models.token_sharding import TokenSharding


class HeadProducts(abc.ABC):
    """The products with the head. All results are float32."""

    @abc.abstractmethod
    def logits(self, x_CD: jax.Array) -> jax.Array:
        """[C, V]."""

    @abc.abstractmethod
    def hidden_gradient(self, d_logits_CV: jax.Array) -> jax.Array:
        """[C, D], of this shard of the vocabulary."""

    @abc.abstractmethod
    def head_gradient(self, d_logits_CV: jax.Array, x_CD: jax.Array) -> jax.Array:
        """[V, D], of these tokens."""


@dataclass(frozen=True)
class PlainHead(HeadProducts):
    """Products in the dtype of the head."""

    w_VD: jax.Array | StoredArray

    def logits(self, x_CD: jax.Array) -> jax.Array:
        return einsum("cd,vd->cv", x_CD, self.w_VD, jnp.float32)

    def hidden_gradient(self, d_logits_CV: jax.Array) -> jax.Array:
        return einsum("cv,vd->cd", d_logits_CV, self.w_VD, jnp.float32)

    def head_gradient(self, d_logits_CV: jax.Array, x_CD: jax.Array) -> jax.Array:
        return head_gradient(d_logits_CV, x_CD)


def head_gradient(d_logits_CV: jax.Array, x_CD: jax.Array) -> jax.Array:
    """The gradient of the head, [V, D] in float32, as a product in the dtype of the logits' gradient."""
    x_CD = x_CD.astype(d_logits_CV.dtype)
    parts = trace_options().block_sizes.head_gradient_parts or _default_parts(x_CD.dtype)
    if parts > 1 and len(x_CD) % parts == 0:
        divided = (a.reshape(parts, -1, a.shape[-1]) for a in (d_logits_CV, x_CD))
        return jnp.einsum("pcv,pcd->vd", *divided, preferred_element_type=jnp.float32)
    return jnp.einsum("cv,cd->vd", d_logits_CV, x_CD, preferred_element_type=jnp.float32)


def _default_parts(dtype: Any) -> int:
    """XLA for CPUs leaves this product to no library, and computes it in float32, unless it sums over two axes. In float32,
    that is not faster with all vocabularies: `jaxlm bench --tune` measures it."""
    return 2 if current_platform() == "cpu" and dtype == jnp.bfloat16 else 1


@dataclass(frozen=True)
class TensorwiseHead(HeadProducts):
    """Products in fp8, with one scale for all hidden states, one for the head and one for the gradient of all logits.

    The scale of the gradient is that of an upper bound: the largest gradient of all tokens is not known while they are
    processed in chunks, and the chunks depend on the number of devices. e5m2 has the range for it.

    Attributes:
        x_scale, gradient_scale: scales of the hidden states and of the gradient of the logits.
        w_VD: the head.
    """

    fp8: Fp8
    x_scale: jax.Array
    gradient_scale: jax.Array
    w_VD: Scaled

    @staticmethod
    def of(fp8: Fp8, x_BSD: jax.Array, w_VD: jax.Array, bound: jax.Array, sharding: TokenSharding) -> "TensorwiseHead":
        """The products for these hidden states. Args: bound: no gradient of this device's logits is larger."""
        x_scale = fp8.scale(sharding.max_tokens(fp8.maximum(x_BSD, ()).reshape(1, 1)))
        gradient_scale = fp8.scale(sharding.max_tokens(bound.reshape(1, 1)), fp8.gradient_dtype)
        w_scale = fp8.scale(sharding.max_vocab(fp8.maximum(w_VD, ())))
        return TensorwiseHead(fp8, x_scale, gradient_scale, to_fp8(w_VD, w_scale))

    def logits(self, x_CD: jax.Array) -> jax.Array:
        return scaled_product(to_fp8(x_CD, self.x_scale), self.w_VD, (1,), (1,), jnp.float32, fast=True)

    def hidden_gradient(self, d_logits_CV: jax.Array) -> jax.Array:
        return scaled_product(self._gradient(d_logits_CV), self.w_VD, (1,), (0,), jnp.float32)

    def head_gradient(self, d_logits_CV: jax.Array, x_CD: jax.Array) -> jax.Array:
        x = to_fp8(x_CD, self.x_scale)
        return scaled_product(self._gradient(d_logits_CV), x, (0,), (0,), jnp.float32)

    def _gradient(self, d_logits_CV: jax.Array) -> Scaled:
        return to_fp8(d_logits_CV, self.gradient_scale, self.fp8.gradient_dtype)


@dataclass(frozen=True)
class RowwiseHead(HeadProducts):
    """Products in fp8 with a scale for each vector that they sum over, except the gradient of the head.

    That product sums over all tokens, so its scales would depend on how the tokens are divided into chunks and devices. It
    is computed in the dtype of the head.

    Attributes:
        w_VD: the head with a scale per token of the vocabulary.
        w_for_gradient_VD: the head with a scale per feature.
    """

    fp8: Fp8
    sharding: TokenSharding
    w_VD: Scaled
    w_for_gradient_VD: Scaled

    @staticmethod
    def of(fp8: Fp8, w_VD: jax.Array, sharding: TokenSharding) -> "RowwiseHead":
        """The products with this head."""
        scale = fp8.scale(sharding.max_vocab(fp8.maximum(w_VD, (0,))))
        return RowwiseHead(fp8, sharding, fp8.quantized(w_VD, (1,)), to_fp8(w_VD, scale))

    def logits(self, x_CD: jax.Array) -> jax.Array:
        return scaled_product(self.fp8.quantized(x_CD, (1,)), self.w_VD, (1,), (1,), jnp.float32, fast=True)

    def hidden_gradient(self, d_logits_CV: jax.Array) -> jax.Array:
        largest_C1 = self.sharding.max_vocab(self.fp8.maximum(d_logits_CV, (1,)))
        gradient = to_fp8(d_logits_CV, self.fp8.scale(largest_C1, self.fp8.gradient_dtype), self.fp8.gradient_dtype)
        return scaled_product(gradient, self.w_for_gradient_VD, (1,), (0,), jnp.float32)

    def head_gradient(self, d_logits_CV: jax.Array, x_CD: jax.Array) -> jax.Array:
        return head_gradient(d_logits_CV, x_CD)


class HeadKind(Protocol):
    """Computes the products with a head. Static, so it must be hashable."""

    def __call__(
        self, x_BSD: jax.Array, w_VD: jax.Array | StoredArray, columns: Sequence[jax.Array], sharding: TokenSharding
    ) -> HeadProducts:
        """The products for these hidden states. Args: columns: those of the loss."""
        ...


def plain_head(x_BSD: Any, w_VD: jax.Array | StoredArray, columns: Any, sharding: TokenSharding) -> HeadProducts:
    """Products in the dtype of the head."""
    return PlainHead(w_VD)


@dataclass(frozen=True)
class NextTokenFp8:
    """Products in fp8, for the next-token loss with targets and the loss mask as columns.

    Attributes:
        z: weight of the z-loss.
    """

    fp8: Fp8
    z: float

    def __call__(self, x_BSD, w_VD, columns, sharding: TokenSharding) -> HeadProducts:
        if self.fp8.recipe == "rowwise":
            return RowwiseHead.of(self.fp8, w_VD, sharding)
        # A probability minus a target is within [-1, 1]. The z-loss adds 2 z lse times a probability.
        bound = jnp.max(jnp.abs(columns[1])) * (1 + 2 * self.z * _LARGE_LSE)
        return TensorwiseHead.of(self.fp8, x_BSD, w_VD, bound, sharding)


_LARGE_LSE = 1000.0  # logsumexp of a model that is about to diverge; beyond it, gradients saturate


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
    def sums(
        self, logits_CV: jax.Array, columns: tuple[jax.Array, ...], heads: tuple[jax.Array | StoredArray, ...]
    ) -> tuple[jax.Array, Any]:
        """The sums over a chunk, float32 [num_sums], and what `logit_gradient` needs besides."""

    @abc.abstractmethod
    def logit_gradient(self, logits_CV: jax.Array, saved: Any, columns: tuple[jax.Array, ...]) -> jax.Array:
        """The gradient of the first sum with respect to the logits after the soft cap, float32 [C, V]."""


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
        num_local = logits_CV.shape[1]
        ids_C = sharding.local_ids(token_C, num_local)
        logits_CV = jnp.where(ids_C[:, None] == jnp.arange(num_local, dtype=ids_C.dtype), _NEVER, logits_CV)
    return logits_CV


def local_logits(logits_CV: jax.Array, num_local: int, sharding: TokenSharding) -> jax.Array:
    """This device's shard of the logits of the whole vocabulary, with its padding."""
    if not sharding.vocab_axes and num_local == logits_CV.shape[1]:
        return logits_CV
    padding = sharding.padded_vocab_size - logits_CV.shape[1]
    padded = jnp.pad(logits_CV, ((0, 0), (0, padding)), constant_values=_NEVER)
    return jax.lax.dynamic_slice_in_dim(padded, sharding.first_id(num_local), num_local, axis=1)


class LogitSummary(NamedTuple):
    """Holds what a loss needs of the logits of a chunk besides those of the targets.

    Attributes:
        lse: [C], log of the sum over the vocabulary of exp(logits).
        first_maximum: int32 [C], the first index of the largest logit in this shard of the vocabulary; the size of the
            shard if the largest logit is in another.
    """

    lse: jax.Array
    first_maximum: jax.Array

    @staticmethod
    def of(logits_CV: jax.Array, sharding: TokenSharding) -> "LogitSummary":
        """Summarizes logits. GPUs take longer to read them than to compute with them, and read them once."""
        num_local = logits_CV.shape[1]
        # jax loses the derivative of `online_maximum` when it differentiates a loop that it has differentiated before.
        if current_platform() == "gpu" and not trace_options().twice_differentiable:
            local_top_C, local_sum_C, local_first_C = online_maximum(logits_CV)
            local_top_C = jax.lax.stop_gradient(local_top_C)
            top_C = sharding.max_vocab(local_top_C)
            sum_C = sharding.sum_vocab(local_sum_C * jnp.exp(local_top_C - top_C))
            return LogitSummary(top_C + jnp.log(sum_C), jnp.where(local_top_C == top_C, local_first_C, num_local))
        top_C = jax.lax.stop_gradient(sharding.max_vocab(jnp.max(logits_CV, axis=1)))
        sum_C = sharding.sum_vocab(jnp.sum(jnp.exp(logits_CV - top_C[:, None]), axis=1))
        index_V = jnp.arange(num_local, dtype=jnp.int32)
        first_C = jnp.where(logits_CV == top_C[:, None], index_V, num_local).min(axis=1)
        return LogitSummary(top_C + jnp.log(sum_C), first_C)


def logsumexp(logits_CV: jax.Array, sharding: TokenSharding) -> jax.Array:
    """[C]: log of the sum over the vocabulary of exp(logits)."""
    return LogitSummary.of(logits_CV, sharding).lse


@jax.custom_jvp
def online_maximum(logits_CV: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The maximum, the sum of exp(logits - maximum), and the first index of the maximum, [C] each, in one pass.

    The derivative is that of the sum, for a constant maximum, as `LogitSummary` needs it. Source: online softmax (Milakov
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


def target_logit(logits_CV: jax.Array, y_C: jax.Array, sharding: TokenSharding) -> jax.Array:
    """The logit of the target; NaN if the target is outside the vocabulary."""
    num_local = logits_CV.shape[1]
    ids = sharding.local_ids(y_C, num_local)
    is_local = (ids >= 0) & (ids < num_local) & (y_C < sharding.vocab_size)
    local_logit = jnp.take_along_axis(logits_CV, jnp.clip(ids, 0, num_local - 1)[:, None], axis=1)[:, 0]
    num_owners = sharding.sum_vocab(is_local.astype(jnp.float32))
    return jnp.where(num_owners > 0, sharding.sum_vocab(jnp.where(is_local, local_logit, 0.0)), jnp.nan)


def is_first_maximum(first_C: jax.Array, y_C: jax.Array, num_local: int, sharding: TokenSharding) -> jax.Array:
    """Tells whether greedy decoding would pick the target. Args: first_C: `LogitSummary.first_maximum`."""
    ids = sharding.local_ids(y_C, num_local)
    # A maximum before the target wins: in this shard, or anywhere in an earlier shard. One in a later shard does not.
    has_earlier = (first_C < num_local) & (first_C < ids)
    is_target = (first_C == ids) & (ids < num_local)
    return (sharding.sum_vocab(is_target.astype(jnp.int32)) > 0) & (
        sharding.sum_vocab(has_earlier.astype(jnp.int32)) == 0
    )


def masked_sums(values: tuple[jax.Array, ...], m_C: jax.Array) -> jax.Array:
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
    x_BSD: jax.Array,
    w_VD: jax.Array | StoredArray | None,
    columns: tuple[jax.Array, ...],
    heads: tuple[jax.Array | StoredArray, ...] = (),
) -> tuple[jax.Array, ...]:
    """The sums of a loss over all tokens, float32 scalars. Only the first has a gradient, for `x_BSD` and `w_VD`.

    Args:
        columns: what the loss reads of each token besides its logits, [B, S, ...].
        heads: [V, D] arrays that the loss reads besides, sharded like `w_VD`.
    """
    first, rest = _run(loss, x_BSD, w_VD, columns, heads)  # type: ignore[misc]
    return first, *map(jax.lax.stop_gradient, rest)


def _scan_chunks(loss: ChunkedLoss, needed: _Needed, x_BSD, w_VD, columns, heads):
    """The sums over all tokens and the needed gradients, in one scan over this device's chunks."""
    chunks, num_tokens = chunked((x_BSD, *columns), loss.chunk_tokens)
    products = None if w_VD is None else loss.products(x_BSD, w_VD, columns, loss.sharding)

    def one_chunk(carry, chunk):
        sums, dw_VD = carry
        x_CD, *columns = chunk
        logits_CV = logits_of(x_CD, products, loss.soft_cap, loss.sharding)
        chunk_sums, saved = loss.sums(logits_CV, tuple(columns), heads)
        dx_CD = None
        if needed.hidden or needed.head:
            dtype = x_CD.dtype if w_VD is None else w_VD.dtype  # of the following matrix products
            gradient_CV = loss.logit_gradient(logits_CV, saved, tuple(columns))
            if loss.soft_cap is not None:  # the derivative of the cap in terms of its output
                gradient_CV *= 1 - (logits_CV / loss.soft_cap) ** 2
            dlogits_CV = loss.sharding.fill_padding(gradient_CV, 0.0).astype(dtype)
        if needed.hidden and products is not None:
            dx_CD = loss.sharding.sum_vocab(products.hidden_gradient(dlogits_CV)).astype(x_CD.dtype)
        elif needed.hidden:
            dx_CD = dlogits_CV
        if needed.head and products is not None:
            dw_VD += products.head_gradient(dlogits_CV, x_CD)
        return (sums + chunk_sums, dw_VD), dx_CD

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
