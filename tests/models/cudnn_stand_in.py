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
    return (out, jax.nn.logsumexp(scores, axis=-1)) if return_residual else out


def stand_in_backward(q, k, v, *rest, scale, mask_type, sliding_window_length, **_):
    lse, out, d_out = rest[-3:]
    shape = k.shape
    _, visible = seen(q.shape, k.shape[1], None, None, sliding_window_length, mask_type == fused.MaskType.CAUSAL)
    k, v = repeated(q, k, v)
    weights = jnp.where(visible, jnp.exp(jnp.einsum("btnh,bsnh->bnts", q, k) * scale - lse[..., None]), 0)
    delta = jnp.einsum("btnh,btnh->bnt", out, d_out)[..., None]
    d_scores = weights * (jnp.einsum("btnh,bsnh->bnts", d_out, v) - delta) * scale
    together = lambda t: t.reshape(*shape[:3], -1, shape[3]).sum(3)  # noqa: E731
    dk, dv = jnp.einsum("bnts,btnh->bsnh", d_scores, q), jnp.einsum("bnts,btnh->bsnh", weights, d_out)
    return [jnp.einsum("bnts,bsnh->btnh", d_scores, k), together(dk), together(dv)]
