"""Attention of new tokens to a KV cache and to each other, without copying the cache.

Scores of cached and new keys are computed separately and normalized by one softmax, so the cache is only read. New keys
and values of all layers are written at once, after the last layer.

Shapes: B batch, T new tokens, S slots, K key/value heads, G query heads per key/value head, H head size; R the heads of
all rows as the cache stores them (B and K, or both as one axis); Q the queries of a head (G and T as one axis). Keys that
value heads share: J key heads, each with F query heads.
"""

import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import BATCH, HEAD_SIZE, HEADS, KEY_HEADS, KEY_POSITION, KV_HEADS, POSITION
from jaxlm.models.attention.api import AttentionSpec, mask_and_distance
from jaxlm.models.mixers.key_values import KVArray


@jax.named_scope("attention")
def cached_attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    cached_keys: KVArray,
    cached_values: KVArray,
    spec: AttentionSpec,
) -> NamedArray:
    """`attention` over the cached slots followed by the new tokens; returns {batch, position, heads, head_size}, with the
    head size of the values.

    Args:
        q: {batch, position, heads, head_size}.
        k, v: {batch, position, kv_heads, head_size}. Keys may have fewer heads than values, `key_heads`.
        cached_keys, cached_values: of one layer.
        spec: the keys of its mask are the cached slots followed by the new tokens. Dropout, backend and sharding do not
            apply.
    """
    q = q.rearrange((BATCH, POSITION, HEADS, HEAD_SIZE))
    k_BTJH = k.rearrange((BATCH, POSITION, KEY_HEADS if k.has_axis(KEY_HEADS) else KV_HEADS, HEAD_SIZE)).array
    v_BTKH = v.rearrange((BATCH, POSITION, KV_HEADS, HEAD_SIZE)).array
    batch, length, num_key_heads, head_size = k_BTJH.shape
    q_BJFTH = q.array.reshape(batch, length, num_key_heads, -1, head_size).transpose(0, 2, 3, 1, 4)
    key_rows, num_slots = cached_keys.values.array.shape[:-2], cached_keys.values.axis_size(KEY_POSITION)
    q_RQH = q_BJFTH.reshape(*key_rows, -1, head_size)
    by_value_head = (batch, v_BTKH.shape[2], -1, length, num_slots)
    cached_BKGTS = _scores(q_RQH, cached_keys).reshape(by_value_head)
    new_BJFTS = jnp.einsum("bkgth,bskh->bkgts", q_BJFTH, k_BTJH, preferred_element_type=jnp.float32)
    new_BKGTS = new_BJFTS.reshape(*by_value_head[:-1], length)
    out_BTNH = _attended(cached_BKGTS, new_BKGTS, cached_values, v_BTKH, spec, spec.factor(head_size))
    return NamedArray(out_BTNH, (*q.axes[:-1], v.resolve_axis(HEAD_SIZE)))


@jax.named_scope("attention")
def cached_latent_attention(
    q: tuple[NamedArray, NamedArray],
    new: tuple[NamedArray, NamedArray],
    cached: tuple[KVArray, KVArray],
    spec: AttentionSpec,
) -> NamedArray:
    """`cached_attention` of heads that share one key, in two parts, of which the first is also the value; returns
    {batch, position, heads, head_size}, with the features of the value.

    Args:
        q: both parts, {batch, position, heads, head_size}.
        new: the key of each new token, {batch, position, head_size}.
        cached: of one layer, without heads.
        spec: as for `cached_attention`, with a scale.
    """
    axes = q[0].rearrange((BATCH, POSITION, HEADS, HEAD_SIZE)).axes
    batch, length, num_heads, _ = (axis.size for axis in axes)
    by_head = (batch, 1, num_heads, length, -1)
    cached_BKGTS, new_BKGTS = jnp.float32(0.0), jnp.float32(0.0)
    for queries, keys, slots in zip(q, new, cached, strict=True):
        q_BNTH = queries.rearrange((BATCH, HEADS, POSITION, HEAD_SIZE)).array
        k_BTH = keys.rearrange((BATCH, POSITION, HEAD_SIZE)).array
        q_RQH = q_BNTH.reshape(*slots.values.array.shape[:-2], -1, k_BTH.shape[-1])
        cached_BKGTS += _scores(q_RQH, slots).reshape(by_head)
        new_BNTS = jnp.einsum("bnth,bsh->bnts", q_BNTH, k_BTH, preferred_element_type=jnp.float32)
        new_BKGTS += new_BNTS.reshape(by_head)
    v_BTKH = new[0].rearrange((BATCH, POSITION, HEAD_SIZE)).array[:, :, None]
    out_BTNH = _attended(cached_BKGTS, new_BKGTS, cached[0], v_BTKH, spec, spec.factor(0))
    return NamedArray(out_BTNH, (*axes[:-1], new[0].resolve_axis(HEAD_SIZE)))


def _attended(
    cached_BKGTS: jax.Array,
    new_BKGTS: jax.Array,
    cached_values: KVArray,
    v_BTKH: jax.Array,
    spec: AttentionSpec,
    factor: float | jax.Array,
) -> jax.Array:
    """The values of cached slots and of new tokens by the softmax of their scores, [B, T, heads, H]."""
    num_slots = cached_BKGTS.shape[-1]
    mask_BTS, distance_BTS = mask_and_distance(spec)
    scores = spec.rule(jnp.concatenate([cached_BKGTS, new_BKGTS], axis=-1) * factor, distance_BTS)
    scores = jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if spec.null_slot is not None:  # after the new keys
        scores, v_BTKH = spec.null_slot.joined(scores, v_BTKH)
    weights = jax.nn.softmax(scores, axis=-1)
    # Padding attends to nothing. Its softmax is uniform, so the weights are zeroed.
    weights = jnp.where(mask_BTS.any(axis=-1)[:, None, None, :, None], weights, 0.0)
    rows = cached_values.values.array.shape[:-2]
    out_RQH = _weighted_values(weights[..., :num_slots].reshape(*rows, -1, num_slots), cached_values, v_BTKH.dtype)
    out_BTKGH = out_RQH.reshape(*weights.shape[:-1], -1).transpose(0, 3, 1, 2, 4)
    out_BTKGH += jnp.einsum("bkgts,bskh->btkgh", weights[..., num_slots:].astype(v_BTKH.dtype), v_BTKH)
    return out_BTKGH.reshape(*out_BTKGH.shape[:2], -1, out_BTKGH.shape[-1])


def _scores(q_RQH: jax.Array, keys: KVArray) -> jax.Array:
    keys_RSH = keys.values.array.astype(q_RQH.dtype)
    scores = jnp.einsum("...qh,...sh->...qs", q_RQH, keys_RSH, preferred_element_type=jnp.float32)
    return scores if keys.scale is None else scores * keys.scale.array[..., None, :]


def _weighted_values(weights_RQS: jax.Array, values: KVArray, dtype: jnp.dtype) -> jax.Array:
    if values.scale is not None:
        weights_RQS = weights_RQS * values.scale.array[..., None, :]
    return jnp.einsum("...qs,...sh->...qh", weights_RQS.astype(dtype), values.values.array.astype(dtype))
