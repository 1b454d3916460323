"""Next-token cross-entropy in chunks of tokens, with its gradient computed in the forward pass.

Source: plain cross-entropy with the z-loss of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5) and the label
smoothing of Szegedy et al. 2016 (arXiv:1512.00567, section 7) and the soft cap of Gemma 2 (arXiv:2408.00118, section 2:
logits become cap * tanh(logits / cap)). The gradient is computed beside the loss, chunk by
chunk, as in Liger Kernel (Hsu et al. 2024, arXiv:2410.10989, section 3.2).

The logits of all tokens, [tokens, vocab] in float32, would be by far the largest array of a training step. Here a scan
walks over chunks of tokens; each step makes the logits of its chunk, reads the loss off them, turns them into their
gradient and multiplies that into the gradients of the hidden states and of the head. That is three matrix products, as
many as without chunks, where making the logits again in the backward pass would take four. Tokens are cut and never the
vocabulary, and odd numbers of them are padded, so the matrix products stay large.

On a mesh every device walks over its own tokens (`jax.shard_map`); the head's gradient is summed once, at the end, and
scattered to where the parameter rests.

Shapes: B batch, S position, C tokens of a chunk, N chunks, D embed, V vocab (this device's part where it is spread).
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
from jaxlm.core.custom_vjp import CustomVjp, is_twice_differentiable
from jaxlm.core.sharding import current_platform
from jaxlm.models.token_sharding import TokenSharding


class CrossEntropySums(eqx.Module):
    """Sums over the tokens of a batch, weighted by the loss mask. Scalars, float32.

    Attributes:
        total: what is minimised: smoothed cross-entropy plus z-loss. The only one with a gradient.
        cross_entropy: plain negative log-likelihood, in nats.
        z_loss: the part of `total` that is z-loss.
        correct: how much of the mask lies on tokens whose most likely successor is the target.
    """

    total: jax.Array
    cross_entropy: jax.Array
    z_loss: jax.Array
    correct: jax.Array


def default_chunk_tokens(platform: str) -> int:
    """Tokens of a chunk: large enough for full-speed matrix products, small enough to stay near the processor.

    512 keeps a CPU's logits in its last-level cache; 8192 is 1.6 GB of logits at a vocabulary of 50k.
    """
    return 512 if platform == "cpu" else 8192


def next_token_sums(
    hidden: NamedArray,
    head: NamedArray | None,
    targets: NamedArray,
    loss_mask: NamedArray,
    *,
    soft_cap: float | None = None,
    z_loss_weight: float = 0.0,
    label_smoothing: float = 0.0,
    chunk_tokens: int | None = None,
) -> CrossEntropySums:
    """Summed next-token loss of a batch, without ever holding the logits of all its tokens.

    Differentiable with respect to `hidden` and `head`, each of which costs its matrix product only where a gradient is
    asked for: none in evaluation, none for a frozen head.

    Args:
        hidden: {batch, position, embed}, in the compute dtype.
        head: {vocab, embed}, in the same dtype; None where `hidden` is logits already, {batch, position, vocab}.
        targets: int {batch, position}. A target outside of the vocabulary makes the loss NaN where the mask is not 0.
        loss_mask: float {batch, position}, each token's weight.
        soft_cap: what logits stay below, as the model says; None leaves them as they are.
        z_loss_weight: z in `z * logsumexp(logits)**2`, added to each token's loss.
        label_smoothing: the share of the target distribution that is spread evenly over the vocabulary.
        chunk_tokens: upper bound of tokens a chunk on one device; None takes `default_chunk_tokens`.
    """
    spec = _LossSpec(
        TokenSharding.of(hidden, head),
        _checked_cap(soft_cap),
        float(z_loss_weight),
        float(label_smoothing),
        _chunk_or_default(chunk_tokens),
    )
    x_BSD, w_VD = _plain(hidden, head)
    y_BS, m_BS = (a.rearrange((BATCH, POSITION)).array for a in (targets, loss_mask))
    m_BS = jax.lax.stop_gradient(m_BS.astype(jnp.float32))
    sums: tuple[jax.Array, tuple[jax.Array, ...]] = _loss(spec, x_BSD, w_VD, y_BS, m_BS)  # type: ignore[assignment]
    total, metrics = sums
    return CrossEntropySums(total, *map(jax.lax.stop_gradient, metrics))


def token_losses(
    hidden: NamedArray,
    head: NamedArray | None,
    targets: NamedArray,
    *,
    soft_cap: float | None = None,
    chunk_tokens: int | None = None,
) -> NamedArray:
    """Each token's negative log-likelihood in nats, float32 {batch, position}, for evaluation.

    Takes any cotangent: the backward pass makes each chunk's logits anew. Arguments as in `next_token_sums`.
    """
    place = TokenSharding.of(hidden, head)
    x_BSD, w_VD = _plain(hidden, head)
    chunk, cap = _chunk_or_default(chunk_tokens), _checked_cap(soft_cap)

    def local(x_BSD, w_VD, y_BS):
        (x_NCD, y_NC), num_tokens = _chunked((x_BSD, y_BS), chunk)

        @jax.checkpoint
        def one_chunk(_, xy):
            logits = _logits(xy[0], w_VD, cap)
            return None, _logsumexp(logits, place) - _target_logit(logits, xy[1], place)

        _, nll_NC = jax.lax.scan(one_chunk, None, (x_NCD, y_NC))
        return nll_NC.reshape(-1)[:num_tokens].reshape(y_BS.shape)

    run = place.mapped(local, (place.tokens(1), place.head, place.tokens()), place.tokens())
    y_BS = targets.rearrange((BATCH, POSITION))
    return NamedArray(run(x_BSD, w_VD, y_BS.array), y_BS.axes)


def _plain(hidden: NamedArray, head: NamedArray | None) -> tuple[jax.Array, jax.Array | None]:
    """x_BSD and w_VD; without a head, the logits in place of x."""
    if head is None:
        return hidden.rearrange((BATCH, POSITION, VOCAB)).array, None
    return hidden.rearrange((BATCH, POSITION, EMBED)).array, head.rearrange((VOCAB, EMBED)).array


def soft_capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """cap * tanh(logits / cap): nearly the same for small ones, and never beyond the cap; without a cap, the same."""
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
    """[batch, position, ...] arrays as [N, C, ...], filled up with zeros, and the number of tokens in them."""
    num_tokens = arrays[0].shape[0] * arrays[0].shape[1]
    num_chunks = -(-num_tokens // chunk_tokens)
    size = -(-num_tokens // num_chunks)
    padding = num_chunks * size - num_tokens

    def cut(a):
        flat = a.reshape(num_tokens, *a.shape[2:])
        if padding:
            flat = jnp.pad(flat, ((0, padding),) + ((0, 0),) * (flat.ndim - 1))
        return flat.reshape(num_chunks, size, *flat.shape[1:])

    return tuple(map(cut, arrays)), num_tokens


def _logits(x_CD: jax.Array, w_VD: jax.Array | None, soft_cap: float | None) -> jax.Array:
    if w_VD is None:
        return soft_capped(x_CD.astype(jnp.float32), soft_cap)
    return soft_capped(jnp.einsum("cd,vd->cv", x_CD, w_VD, preferred_element_type=jnp.float32), soft_cap)


def _local_ids(y_C: jax.Array, num_local: int, place: TokenSharding) -> jax.Array:
    """Vocabulary ids as indices into this device's part; those of other parts fall outside of [0, num_local)."""
    return y_C - jax.lax.axis_index(place.vocab_axes) * num_local if place.vocab_axes else y_C


def _logsumexp(logits_CV: jax.Array, place: TokenSharding) -> jax.Array:
    top_C = jax.lax.stop_gradient(place.max_vocab(jnp.max(logits_CV, axis=1)))
    return top_C + jnp.log(place.sum_vocab(jnp.sum(jnp.exp(logits_CV - top_C[:, None]), axis=1)))


def _target_logit(logits_CV: jax.Array, y_C: jax.Array, place: TokenSharding) -> jax.Array:
    """The target's logit; NaN for a target that no device has."""
    num_local = logits_CV.shape[1]
    ids = _local_ids(y_C, num_local, place)
    here = (ids >= 0) & (ids < num_local)
    picked = jnp.take_along_axis(logits_CV, jnp.clip(ids, 0, num_local - 1)[:, None], axis=1)[:, 0]
    found = place.sum_vocab(here.astype(jnp.float32))
    return jnp.where(found > 0, place.sum_vocab(jnp.where(here, picked, 0.0)), jnp.nan)


def _is_first_maximum(logits_CV: jax.Array, y_C: jax.Array, place: TokenSharding) -> jax.Array:
    """Whether the target is what greedy decoding would pick (the first of equal maxima)."""
    top_C = place.max_vocab(jnp.max(logits_CV, axis=1))
    num_local = logits_CV.shape[1]
    index = jnp.arange(num_local, dtype=y_C.dtype)
    ids = _local_ids(y_C, num_local, place)
    not_before = jnp.where(logits_CV == top_C[:, None], index, num_local).min(axis=1)
    # A device whose part lies after the target's cannot beat it, one before beats it with any maximum at all.
    beaten = (not_before < num_local) & (not_before < ids)
    reached = (not_before == ids) & (ids < num_local)
    return (place.sum_vocab(reached.astype(jnp.int32)) > 0) & (place.sum_vocab(beaten.astype(jnp.int32)) == 0)


# --- The loss ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LossSpec:
    place: TokenSharding
    soft_cap: float | None
    z: float
    smoothing: float
    chunk_tokens: int


class _Wanted(NamedTuple):
    """Which gradients somebody asks for."""

    hidden: bool
    head: bool


class _Gradients(NamedTuple):
    """Arrays that the forward pass leaves for the backward pass, or their places; None where nobody asks."""

    hidden: Any
    head: Any


def _chunk_loss(spec: _LossSpec, x_CD, w_VD, y_C, m_C):
    """The four sums of a chunk, and what their gradient needs."""
    place = spec.place
    logits_CV = _logits(x_CD, w_VD, spec.soft_cap)
    num_vocab = logits_CV.shape[1] * place.vocab_parts
    lse_C = _logsumexp(logits_CV, place)
    nll_C = lse_C - _target_logit(logits_CV, y_C, place)
    z_C = spec.z * lse_C**2
    loss_C = nll_C + z_C
    if spec.smoothing:
        mean_C = place.sum_vocab(jnp.sum(logits_CV, axis=1)) / num_vocab
        loss_C = (1 - spec.smoothing) * nll_C + spec.smoothing * (lse_C - mean_C) + z_C
    correct_C = _is_first_maximum(logits_CV, y_C, place)
    # where, not only a product: an ignored target may be anything, and NaN times 0 is NaN
    sums = [jnp.sum(jnp.where(m_C == 0, 0.0, m_C * a)) for a in (loss_C, nll_C, z_C, correct_C)]
    return jnp.stack(sums), logits_CV, lse_C


def _chunk_logit_gradient(spec: _LossSpec, logits_CV, lse_C, y_C, m_C, dtype):
    """d total / d logits of a chunk, in the dtype of the matrix products that follow."""
    num_local = logits_CV.shape[1]
    num_vocab = num_local * spec.place.vocab_parts
    ids_C = _local_ids(y_C, num_local, spec.place)
    is_target_CV = ids_C[:, None] == jnp.arange(num_local, dtype=ids_C.dtype)
    softmax_CV = jnp.exp(logits_CV - lse_C[:, None])
    scale_C = 1 + 2 * spec.z * lse_C
    wanted_CV = jnp.where(is_target_CV, 1 - spec.smoothing, 0.0) + spec.smoothing / num_vocab
    gradient_CV = m_C[:, None] * (scale_C[:, None] * softmax_CV - wanted_CV)
    if spec.soft_cap is not None:  # the derivative of the cap, by what it has returned
        gradient_CV *= 1 - (logits_CV / spec.soft_cap) ** 2
    return gradient_CV.astype(dtype)


def _walk(spec: _LossSpec, wanted: _Wanted, x_BSD, w_VD, y_BS, m_BS):
    """This device's four sums and, where `wanted` says so, the gradients, in one scan over its chunks."""
    chunks, num_tokens = _chunked((x_BSD, y_BS, m_BS), spec.chunk_tokens)

    def one_chunk(carry, chunk):
        sums, dw_VD = carry
        x_CD, y_C, m_C = chunk
        chunk_sums, logits_CV, lse_C = _chunk_loss(spec, x_CD, w_VD, y_C, m_C)
        dx_CD = None
        if wanted.hidden or wanted.head:
            dlogits_CV = _chunk_logit_gradient(spec, logits_CV, lse_C, y_C, m_C, x_CD.dtype)
        if wanted.hidden and w_VD is None:
            dx_CD = dlogits_CV
        elif wanted.hidden:
            dx_CD = jnp.einsum("cv,vd->cd", dlogits_CV, w_VD, preferred_element_type=jnp.float32)
            dx_CD = spec.place.sum_vocab(dx_CD).astype(x_CD.dtype)
        if wanted.head:
            dw_VD += jnp.einsum("cv,cd->vd", dlogits_CV, x_CD, preferred_element_type=jnp.float32)
        return (sums + chunk_sums, dw_VD), dx_CD

    if is_twice_differentiable():  # then somebody differentiates this very loop, and must not keep all chunks' logits
        one_chunk = jax.checkpoint(one_chunk)
    start = (jnp.zeros(4, jnp.float32), jnp.zeros(w_VD.shape, jnp.float32) if wanted.head else None)
    (sums, dw_VD), dx_NCD = jax.lax.scan(one_chunk, start, chunks)
    dx_BSD = None if dx_NCD is None else dx_NCD.reshape(-1, x_BSD.shape[-1])[:num_tokens].reshape(x_BSD.shape)
    if dw_VD is not None:
        dw_VD = spec.place.to_rest(dw_VD)
    return spec.place.sum_tokens(sums), _Gradients(dx_BSD, dw_VD)


def _walk_on_mesh(spec: _LossSpec, wanted: _Wanted, x_BSD, w_VD, y_BS, m_BS):
    place = spec.place
    in_specs = (place.tokens(1), place.head, place.tokens(), place.tokens())
    out_specs = (
        PartitionSpec(),
        _Gradients(place.tokens(1) if wanted.hidden else None, place.head_at_rest if wanted.head else None),
    )
    sums, gradients = place.mapped(functools.partial(_walk, spec, wanted), in_specs, out_specs)(x_BSD, w_VD, y_BS, m_BS)
    return (sums[0], (sums[1], sums[2], sums[3])), gradients


@functools.partial(CustomVjp, nondiff_argnums=(0,))
def _loss(spec: _LossSpec, x_BSD, w_VD, y_BS, m_BS) -> Any:
    return _walk_on_mesh(spec, _Wanted(False, False), x_BSD, w_VD, y_BS, m_BS)[0]


def _loss_forward(spec: _LossSpec, x, w, y, m):
    head = None if w is None else w.value
    wanted = _Wanted(x.perturbed, w is not None and w.perturbed)
    out, gradients = _walk_on_mesh(spec, wanted, x.value, head, y.value, m.value)
    # An empty array carries the head's dtype, which the float32 sum has lost, to the backward pass.
    return out, (gradients, None if head is None else jnp.empty(0, head.dtype))


def _loss_backward(spec: _LossSpec, kept, cotangents):
    gradients, head_like = kept
    d_total = cotangents[0]
    if isinstance(d_total, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None
    d_hidden = None if gradients.hidden is None else (d_total * gradients.hidden).astype(gradients.hidden.dtype)
    d_head = None if gradients.head is None else (d_total * gradients.head).astype(head_like.dtype)
    return d_hidden, d_head, None, None


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)
