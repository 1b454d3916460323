"""Chunked next-token cross-entropy whose gradient is computed in the forward pass.

Source: cross-entropy with the z-loss of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5), the label smoothing
of Szegedy et al. 2016 (arXiv:1512.00567, section 7) and the logit soft cap of Gemma 2 (arXiv:2408.00118, section 2).
The gradient is computed together with the loss, chunk by chunk, as in Liger Kernel (Hsu et al. 2024, arXiv:2410.10989,
section 3.2).

The logits of all tokens, [tokens, vocab] in float32, would be by far the largest array of a training step. Instead, a
scan runs over chunks of tokens. Each step computes the logits of its chunk, the loss and its gradient with respect to
the logits, and multiplies the latter into the gradients of the hidden states and the head. That takes three matrix
products, as many as without chunks; recomputing the logits in the backward pass would take four. Only tokens are split,
never the vocabulary, and the last chunk is padded, so the matrix products stay large.

On a mesh, each device processes its own tokens (`jax.shard_map`). The gradient of the head is reduced once, at the end,
and scattered to the parameter's sharding.

Shapes: B batch, S position, C tokens of a chunk, N chunks, D embed, V vocab (this device's shard of it).
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import PartitionSpec

from jaxlm.core.axes import BATCH, EMBED, POSITION, VOCAB
from jaxlm.core.custom_vjp import CustomVjp
from jaxlm.core.matmul import StoredArray, StoredWeight, Weight, arranged, einsum
from jaxlm.core.sharding import current_platform
from jaxlm.core.trace_options import trace_options
from jaxlm.models.token_sharding import TokenSharding


class CrossEntropySums(eqx.Module):
    """Sums over the tokens of a batch, weighted by the loss mask. Scalars, float32.

    Attributes:
        total: the objective, smoothed cross-entropy plus z-loss. Only this field has a gradient.
        cross_entropy: negative log-likelihood in nats, without smoothing.
        z_loss: the z-loss contained in `total`.
        correct: sum of the loss mask over tokens whose most likely prediction is the target.
    """

    total: jax.Array
    cross_entropy: jax.Array
    z_loss: jax.Array
    correct: jax.Array


def default_chunk_tokens(platform: str) -> int:
    """Tokens per chunk: large enough for efficient matrix products, small enough for the memory.

    On CPUs, 512 keeps the logits in the last-level cache. 8192 tokens are 1.6 GB of logits for a vocabulary of 50k.
    """
    return 512 if platform == "cpu" else 8192


def next_token_sums(
    hidden: NamedArray,
    head: Weight | None,
    targets: NamedArray,
    loss_mask: NamedArray,
    *,
    soft_cap: float | None = None,
    z_loss_weight: float = 0.0,
    label_smoothing: float = 0.0,
    chunk_tokens: int | None = None,
) -> CrossEntropySums:
    """Summed next-token loss of a batch, without materializing the logits of all tokens.

    Differentiable with respect to `hidden` and `head`. The matrix product of each gradient is only computed if the
    gradient is needed: none in evaluation, not that of a frozen head.

    Args:
        hidden: {batch, position, embed}.
        head: {vocab, embed}; its products are computed in its dtype. None if `hidden` contains logits, {batch,
            position, vocab}.
        targets: int {batch, position}. A target outside the vocabulary makes the loss NaN if its mask is not 0.
        loss_mask: float {batch, position}, the weight of each token.
        soft_cap: soft cap of the logits; None applies no cap.
        z_loss_weight: z in `z * logsumexp(logits)**2`, which is added to each token's loss.
        label_smoothing: fraction of the target distribution that is spread uniformly over the vocabulary.
        chunk_tokens: maximum number of tokens per chunk on one device; None uses `default_chunk_tokens`.
    """
    if isinstance(head, StoredWeight):
        head = head.floats(hidden.dtype)  # the backward pass is for arrays
    spec = _LossSpec(
        TokenSharding.of(hidden, head),
        _checked_cap(soft_cap),
        float(z_loss_weight),
        float(label_smoothing),
        _chunk_or_default(chunk_tokens),
    )
    x_BSD, w_VD = _arrays(hidden, head)
    y_BS, m_BS = (a.rearrange((BATCH, POSITION)).array for a in (targets, loss_mask))
    m_BS = jax.lax.stop_gradient(m_BS.astype(jnp.float32))
    sums: tuple[jax.Array, tuple[jax.Array, ...]] = _loss(spec, x_BSD, w_VD, y_BS, m_BS)  # type: ignore[assignment]
    total, metrics = sums
    return CrossEntropySums(total, *map(jax.lax.stop_gradient, metrics))


def token_losses(
    hidden: NamedArray,
    head: Weight | None,
    targets: NamedArray,
    *,
    soft_cap: float | None = None,
    chunk_tokens: int | None = None,
) -> NamedArray:
    """Negative log-likelihood of each token in nats, float32 {batch, position}, for evaluation.

    Supports any cotangent, because the backward pass recomputes the logits of each chunk. Arguments as in
    `next_token_sums`.
    """
    sharding = TokenSharding.of(hidden, head)
    x_BSD, w_VD = _arrays(hidden, head)
    chunk, cap = _chunk_or_default(chunk_tokens), _checked_cap(soft_cap)

    def local(x_BSD, w_VD, y_BS):
        (x_NCD, y_NC), num_tokens = _chunked((x_BSD, y_BS), chunk)

        @jax.checkpoint
        def one_chunk(_, xy):
            logits = _logits(xy[0], w_VD, cap)
            return None, _logsumexp(logits, sharding) - _target_logit(logits, xy[1], sharding)

        _, nll_NC = jax.lax.scan(one_chunk, None, (x_NCD, y_NC))
        return nll_NC.reshape(-1)[:num_tokens].reshape(y_BS.shape)

    in_specs = (sharding.tokens(1), sharding.head, sharding.tokens())
    run = sharding.shard_map(local, in_specs, sharding.tokens())
    y_BS = targets.rearrange((BATCH, POSITION))
    return NamedArray(run(x_BSD, w_VD, y_BS.array), y_BS.axes)


def _arrays(hidden: NamedArray, head: Weight | None) -> tuple[jax.Array, jax.Array | StoredArray | None]:
    """x_BSD and w_VD; without a head, the logits and None."""
    if head is None:
        return hidden.rearrange((BATCH, POSITION, VOCAB)).array, None
    return hidden.rearrange((BATCH, POSITION, EMBED)).array, arranged(head, (VOCAB, EMBED))


def soft_capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """cap * tanh(logits / cap); without a cap, the logits."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _checked_cap(soft_cap: float | None) -> float | None:
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: {soft_cap} given, more than 0 or None expected")
    return soft_cap


def _chunk_or_default(chunk_tokens: int | None) -> int:
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: {chunk_tokens} given, 1 or more expected")
    return default_chunk_tokens(current_platform()) if chunk_tokens is None else chunk_tokens


# --- One chunk --------------------------------------------------------------------------------------------------------


def _chunked(arrays: tuple[jax.Array, ...], chunk_tokens: int) -> tuple[tuple[jax.Array, ...], int]:
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


def _logits(x_CD: jax.Array, w_VD: jax.Array | StoredArray | None, soft_cap: float | None) -> jax.Array:
    if w_VD is None:
        return soft_capped(x_CD.astype(jnp.float32), soft_cap)
    return soft_capped(einsum("cd,vd->cv", x_CD, w_VD, jnp.float32), soft_cap)


def _local_ids(y_C: jax.Array, num_local: int, sharding: TokenSharding) -> jax.Array:
    """Token ids as indices into this device's shard of the vocabulary; outside [0, num_local) for other shards."""
    return y_C - jax.lax.axis_index(sharding.vocab_axes) * num_local if sharding.vocab_axes else y_C


def _logsumexp(logits_CV: jax.Array, sharding: TokenSharding) -> jax.Array:
    top_C = jax.lax.stop_gradient(sharding.max_vocab(jnp.max(logits_CV, axis=1)))
    return top_C + jnp.log(sharding.sum_vocab(jnp.sum(jnp.exp(logits_CV - top_C[:, None]), axis=1)))


def _target_logit(logits_CV: jax.Array, y_C: jax.Array, sharding: TokenSharding) -> jax.Array:
    """The logit of the target; NaN if the target is outside the vocabulary."""
    num_local = logits_CV.shape[1]
    ids = _local_ids(y_C, num_local, sharding)
    is_local = (ids >= 0) & (ids < num_local)
    local_logit = jnp.take_along_axis(logits_CV, jnp.clip(ids, 0, num_local - 1)[:, None], axis=1)[:, 0]
    num_owners = sharding.sum_vocab(is_local.astype(jnp.float32))
    return jnp.where(num_owners > 0, sharding.sum_vocab(jnp.where(is_local, local_logit, 0.0)), jnp.nan)


def _is_first_maximum(logits_CV: jax.Array, y_C: jax.Array, sharding: TokenSharding) -> jax.Array:
    """Whether greedy decoding would pick the target (the first of equal maxima)."""
    top_C = sharding.max_vocab(jnp.max(logits_CV, axis=1))
    num_local = logits_CV.shape[1]
    index = jnp.arange(num_local, dtype=y_C.dtype)
    ids = _local_ids(y_C, num_local, sharding)
    first_max = jnp.where(logits_CV == top_C[:, None], index, num_local).min(axis=1)
    # A maximum before the target wins: in this shard, or anywhere in an earlier shard. One in a later shard does not.
    has_earlier = (first_max < num_local) & (first_max < ids)
    is_target = (first_max == ids) & (ids < num_local)
    return (sharding.sum_vocab(is_target.astype(jnp.int32)) > 0) & (
        sharding.sum_vocab(has_earlier.astype(jnp.int32)) == 0
    )


# --- The loss ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LossSpec:
    sharding: TokenSharding
    soft_cap: float | None
    z: float
    smoothing: float
    chunk_tokens: int


class _Needed(NamedTuple):
    """Which gradients are needed."""

    hidden: bool
    head: bool


class _Gradients(NamedTuple):
    """Gradients saved by the forward pass, or their partition specs; None if not needed."""

    hidden: Any
    head: Any


def _chunk_loss(spec: _LossSpec, x_CD, w_VD, y_C, m_C):
    """The four sums of a chunk, its logits and their logsumexp."""
    sharding = spec.sharding
    logits_CV = _logits(x_CD, w_VD, spec.soft_cap)
    num_vocab = logits_CV.shape[1] * sharding.vocab_shards
    lse_C = _logsumexp(logits_CV, sharding)
    nll_C = lse_C - _target_logit(logits_CV, y_C, sharding)
    z_C = spec.z * lse_C**2
    loss_C = nll_C + z_C
    if spec.smoothing:
        mean_C = sharding.sum_vocab(jnp.sum(logits_CV, axis=1)) / num_vocab
        loss_C = (1 - spec.smoothing) * nll_C + spec.smoothing * (lse_C - mean_C) + z_C
    correct_C = _is_first_maximum(logits_CV, y_C, sharding)
    # jnp.where, because a masked target may be outside the vocabulary, and NaN times 0 is NaN.
    sums = [jnp.sum(jnp.where(m_C == 0, 0.0, m_C * a)) for a in (loss_C, nll_C, z_C, correct_C)]
    return jnp.stack(sums), logits_CV, lse_C


def _chunk_logit_gradient(spec: _LossSpec, logits_CV, lse_C, y_C, m_C, dtype):
    """d total / d logits of a chunk, in `dtype`, that of the following matrix products."""
    num_local = logits_CV.shape[1]
    num_vocab = num_local * spec.sharding.vocab_shards
    ids_C = _local_ids(y_C, num_local, spec.sharding)
    is_target_CV = ids_C[:, None] == jnp.arange(num_local, dtype=ids_C.dtype)
    softmax_CV = jnp.exp(logits_CV - lse_C[:, None])
    scale_C = 1 + 2 * spec.z * lse_C
    target_CV = jnp.where(is_target_CV, 1 - spec.smoothing, 0.0) + spec.smoothing / num_vocab
    gradient_CV = m_C[:, None] * (scale_C[:, None] * softmax_CV - target_CV)
    if spec.soft_cap is not None:  # the derivative of the cap in terms of its output
        gradient_CV *= 1 - (logits_CV / spec.soft_cap) ** 2
    return gradient_CV.astype(dtype)


def _scan_chunks(spec: _LossSpec, needed: _Needed, x_BSD, w_VD, y_BS, m_BS):
    """The four sums over all tokens and the needed gradients, in one scan over this device's chunks."""
    chunks, num_tokens = _chunked((x_BSD, y_BS, m_BS), spec.chunk_tokens)

    def one_chunk(carry, chunk):
        sums, dw_VD = carry
        x_CD, y_C, m_C = chunk
        chunk_sums, logits_CV, lse_C = _chunk_loss(spec, x_CD, w_VD, y_C, m_C)
        dx_CD = None
        if needed.hidden or needed.head:
            dtype = x_CD.dtype if w_VD is None else w_VD.dtype
            dlogits_CV = _chunk_logit_gradient(spec, logits_CV, lse_C, y_C, m_C, dtype)
        if needed.hidden and w_VD is not None:
            dx_CD = einsum("cv,vd->cd", dlogits_CV, w_VD, jnp.float32)
            dx_CD = spec.sharding.sum_vocab(dx_CD).astype(x_CD.dtype)
        elif needed.hidden:
            dx_CD = dlogits_CV
        if needed.head:
            x_CD = x_CD.astype(dtype)
            dw_VD += jnp.einsum("cv,cd->vd", dlogits_CV, x_CD, preferred_element_type=jnp.float32)
        return (sums + chunk_sums, dw_VD), dx_CD

    if trace_options().twice_differentiable:  # the loop itself is differentiated, and must not save all logits
        one_chunk = jax.checkpoint(one_chunk)
    start = (jnp.zeros(4, jnp.float32), jnp.zeros(w_VD.shape, jnp.float32) if needed.head else None)
    (sums, dw_VD), dx_NCD = jax.lax.scan(one_chunk, start, chunks)
    dx_BSD = None if dx_NCD is None else dx_NCD.reshape(-1, x_BSD.shape[-1])[:num_tokens].reshape(x_BSD.shape)
    if dw_VD is not None:
        dw_VD = spec.sharding.reduce_head_gradient(dw_VD)
    return spec.sharding.sum_tokens(sums), _Gradients(dx_BSD, dw_VD)


def _sums_and_gradients(spec: _LossSpec, needed: _Needed, x_BSD, w_VD, y_BS, m_BS):
    sharding = spec.sharding
    in_specs = (sharding.tokens(1), sharding.head, sharding.tokens(), sharding.tokens())
    out_specs = (
        PartitionSpec(),
        _Gradients(sharding.tokens(1) if needed.hidden else None, sharding.head_at_rest if needed.head else None),
    )
    run = sharding.shard_map(functools.partial(_scan_chunks, spec, needed), in_specs, out_specs)
    sums, gradients = run(x_BSD, w_VD, y_BS, m_BS)
    return (sums[0], (sums[1], sums[2], sums[3])), gradients


@functools.partial(CustomVjp, nondiff_argnums=(0,))
def _loss(spec: _LossSpec, x_BSD, w_VD, y_BS, m_BS) -> Any:
    return _sums_and_gradients(spec, _Needed(False, False), x_BSD, w_VD, y_BS, m_BS)[0]


def _loss_forward(spec: _LossSpec, x, w, y, m):
    head = None if w is None else w.value
    needed = _Needed(x.perturbed, w is not None and w.perturbed)
    out, gradients = _sums_and_gradients(spec, needed, x.value, head, y.value, m.value)
    # The gradient of the head is float32. An empty array passes the head's dtype to the backward pass.
    return out, (gradients, None if head is None else jnp.empty(0, head.dtype))


def _loss_backward(spec: _LossSpec, residuals, cotangents):
    gradients, head_like = residuals
    d_total = cotangents[0]
    if isinstance(d_total, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None
    d_hidden = None if gradients.hidden is None else (d_total * gradients.hidden).astype(gradients.hidden.dtype)
    d_head = None if gradients.head is None else (d_total * gradients.head).astype(head_like.dtype)
    return d_hidden, d_head, None, None


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)
