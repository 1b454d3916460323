"""Attention of new tokens to a cache and to each other, without a copy of the cache.

Scores of old and of new keys are computed apart and meet in one softmax, so the cache is only read: what is written to
it, all layers write at once, after the last.

Shapes: B batch, T new tokens, S slots, K key/value heads, G query heads a key/value head, H head size; R the heads of all
rows as the cache has them: B and K, or both as one axis; Q what reads a head: T and G as one axis.
"""

import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import BATCH, HEAD_SIZE, HEADS, KEY_POSITION, KV_HEADS, POSITION
from jaxlm.models.attention.api import AttentionMask, mask_and_distance
from jaxlm.models.attention.scores import ScoreRule
from jaxlm.models.base import KVArray


@jax.named_scope("attention")
def cached_attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    past_keys: KVArray,
    past_values: KVArray,
    attention_mask: AttentionMask,
    *,
    scale: float | jax.Array | None,
    window: int | None,
    rule: ScoreRule,
) -> NamedArray:
    """{batch, position, heads, head_size}: what `attention` says of the slots of a cache with the new tokens after them.

    Args:
        q: {batch, position, heads, head_size}.
        k, v: {batch, position, kv_heads, head_size}.
        past_keys, past_values: of one layer.
        visibility: its keys are the slots, and after them the new tokens.
    """
    q = q.rearrange((BATCH, POSITION, HEADS, HEAD_SIZE))
    k_BTKH, v_BTKH = (a.rearrange((BATCH, POSITION, KV_HEADS, HEAD_SIZE)).array for a in (k, v))
    batch, length, num_kv_heads, head_size = k_BTKH.shape
    q_BKGTH = q.array.reshape(batch, length, num_kv_heads, -1, head_size).transpose(0, 2, 3, 1, 4)
    rows, num_slots = past_keys.values.array.shape[:-2], past_keys.values.axis_size(KEY_POSITION)
    q_RQH = q_BKGTH.reshape(*rows, -1, head_size)
    old_BKGTS = _scores(q_RQH, past_keys).reshape(*q_BKGTH.shape[:-1], num_slots)
    new_BKGTS = jnp.einsum("bkgth,bskh->bkgts", q_BKGTH, k_BTKH, preferred_element_type=jnp.float32)
    mask_BTS, distance_BTS = mask_and_distance(attention_mask, window)
    factor = head_size**-0.5 if scale is None else scale
    scores = rule(jnp.concatenate([old_BKGTS, new_BKGTS], axis=-1) * factor, distance_BTS)
    weights = jax.nn.softmax(jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
    # A row of padding sees nothing; its even weights would be finite, but no zero.
    weights = jnp.where(mask_BTS.any(axis=-1)[:, None, None, :, None], weights, 0.0)
    out_RQH = _mixed(weights[..., :num_slots].reshape(*rows, -1, num_slots), past_values, v_BTKH.dtype)
    out_BTKGH = out_RQH.reshape(q_BKGTH.shape).transpose(0, 3, 1, 2, 4)
    out_BTKGH += jnp.einsum("bkgts,bskh->btkgh", weights[..., num_slots:].astype(v_BTKH.dtype), v_BTKH)
    return NamedArray(out_BTKGH.reshape(q.array.shape), q.axes)


def _scores(q_RQH: jax.Array, keys: KVArray) -> jax.Array:
    numbers_RSH = keys.values.array.astype(q_RQH.dtype)
    scores = jnp.einsum("...qh,...sh->...qs", q_RQH, numbers_RSH, preferred_element_type=jnp.float32)
    return scores if keys.scale is None else scores * keys.scale.array[..., None, :]


def _mixed(weights_RQS: jax.Array, values: KVArray, dtype: jnp.dtype) -> jax.Array:
    if values.scale is not None:
        weights_RQS = weights_RQS * values.scale.array[..., None, :]
    return jnp.einsum("...qs,...sh->...qh", weights_RQS.astype(dtype), values.values.array.astype(dtype))
