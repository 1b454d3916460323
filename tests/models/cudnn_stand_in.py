"""Stand-ins for cuDNN's kernels: what its documentation specifies, and NaN where it specifies nothing."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused


def install(monkeypatch):
    """Replaces the kernels' calls."""
    monkeypatch.setattr(fused, "dot_product_attention", stand_in)
    backward = SimpleNamespace(bind=stand_in_backward)
    monkeypatch.setattr(fused, "_dot_product_attention_bwd_p_wrapper", backward)


def seen(shape, num_keys, lengths, offsets, window, causal):
    """The kernel's inputs as segment ids (0 outside all documents) and as a visibility mask."""
    position = jnp.arange(shape[1])
    if num_keys != shape[1]:
        assert (offsets, window, causal) == (None, None, False)
        return jnp.ones(shape[:2], int), jnp.ones((shape[0], 1, shape[1], num_keys), bool)
    document = jnp.ones(shape[:2], int)
    if offsets is not None:
        starts, stops = offsets[:, :-1, None], offsets[:, :-1, None] + lengths[..., None]
        inside = (lengths[..., None] > 0) & (position >= starts) & (position < stops)
        document = jnp.sum(inside * (1 + jnp.arange(lengths.shape[1]))[:, None], axis=1)
    distance = position[:, None] - position
    near = ((distance >= 0) | (not causal)) & (distance < (window or shape[1]))
    return document, (near & (document[:, :, None] == document[:, None, :]) & (document != 0)[:, :, None])[:, None]


def repeated(q, *keys):
    return (jnp.repeat(t, q.shape[2] // t.shape[2], axis=2) for t in keys)


def stand_in(q, k, v, *, q_seqlen=None, kv_seqlen=None, q_offsets=None, kv_offsets=None, scale, mask_type,
             sliding_window_length, return_residual=False):  # fmt: skip
    packed = q_offsets is not None
    kinds = fused.MaskType
    assert mask_type in ((kinds.PADDING_CAUSAL, kinds.PADDING) if packed else (kinds.CAUSAL, kinds.NO_MASK))
    causal = mask_type in (kinds.PADDING_CAUSAL, kinds.CAUSAL)
    assert q_seqlen is kv_seqlen
    assert q_offsets is kv_offsets
    document, visible = seen(q.shape, k.shape[1], q_seqlen, q_offsets, sliding_window_length, causal)
    k, v = repeated(q, k, v)
    scores = jnp.where(visible, jnp.einsum("btnh,bsnh->bnts", q, k) * scale, -1e30)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), v)
    out = jnp.where((document != 0)[:, :, None, None], out, jnp.nan)
    lse = jax.nn.logsumexp(scores, axis=-1)
    lse = by_document(lse, q_seqlen, q_offsets) if packed and return_residual else lse
    return (out, lse) if return_residual else out


def by_document(lse, lengths, offsets):
    """[B, N, T] as the packed kernel has it: documents that are there in front, each from the start; otherwise NaN."""
    place = jnp.arange(lse.shape[-1])
    index = jnp.clip(offsets[:, :-1, None, None] + place, 0, lse.shape[-1] - 1)
    of_documents = jnp.take_along_axis(lse[:, None], index, axis=-1)
    of_documents = jnp.where(place < lengths[..., None, None], of_documents, jnp.nan)
    return of_documents.reshape(-1, *lse.shape[1:])[jnp.argsort(lengths.ravel() < 0, stable=True)]


def by_token(statistics, lengths, offsets, document):
    """The inverse, with any numbers for other tokens. Args: document: number in the row, from 1; 0 for none."""
    number = jnp.cumsum(lengths.ravel() >= 0).reshape(lengths.shape) - 1
    row = jnp.arange(len(lengths))[:, None]
    start = offsets[row, document - 1]
    return statistics[number[row, document - 1], :, jnp.arange(document.shape[1]) - start].swapaxes(1, 2)


def stand_in_backward(q, k, v, *rest, scale, mask_type, sliding_window_length, **_):
    lse, out, d_out = rest[-3:]
    shape = k.shape
    lengths, offsets = (rest[1], rest[3]) if rest[3].size else (None, None)
    causal = mask_type in (fused.MaskType.CAUSAL, fused.MaskType.PADDING_CAUSAL)
    document, visible = seen(q.shape, k.shape[1], lengths, offsets, sliding_window_length, causal)
    if offsets is not None:
        lse = by_token(lse, lengths, offsets, document)
    k, v = repeated(q, k, v)
    weights = jnp.where(visible, jnp.exp(jnp.einsum("btnh,bsnh->bnts", q, k) * scale - lse[..., None]), 0)
    delta = jnp.einsum("btnh,btnh->bnt", out, d_out)[..., None]
    d_scores = weights * (jnp.einsum("btnh,bsnh->bnts", d_out, v) - delta) * scale
    together = lambda t: t.reshape(*shape[:3], -1, shape[3]).sum(3)  # noqa: E731
    dk, dv = jnp.einsum("bnts,btnh->bsnh", d_scores, q), jnp.einsum("bnts,btnh->bsnh", weights, d_out)
    gradients = [jnp.einsum("bnts,bsnh->btnh", d_scores, k), together(dk), together(dv)]
    return (
        [jnp.where((document != 0)[:, :, None, None], g, jnp.nan) for g in gradients]
        if lengths is not None
        else gradients
    )
