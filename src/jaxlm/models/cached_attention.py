"""Attention of new tokens to a cache and to each other, without a copy of the cache.

Scores of old and of new keys are computed apart and meet in one softmax, so the cache is only read: what is written to
it, all layers write at once, after the last.

Shapes: B batch, T new tokens, S slots, K key/value heads, G query heads a key/value head, H head size.
"""

import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import BATCH, HEAD_SIZE, HEADS, KEY_POSITION, KV_HEADS, POSITION
from jaxlm.models.attention import Visibility, mask_and_distance
from jaxlm.models.backends.scores import ScoreRule
from jaxlm.models.base import Column


@jax.named_scope("attention")
def cached_attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    past_keys: Column,
    past_values: Column,
    visibility: Visibility,
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
    batch, length, _, head_size = q.array.shape
    q_BTKGH = q.array.reshape(batch, length, k.axis_size(KV_HEADS), -1, head_size)
    old_BKGTS = _scores(q_BTKGH, past_keys)
    new_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BTKH, preferred_element_type=jnp.float32)
    mask_BTS, distance_BTS = mask_and_distance(visibility, window)
    factor = head_size**-0.5 if scale is None else scale
    scores = rule(jnp.concatenate([old_BKGTS, new_BKGTS], axis=-1) * factor, distance_BTS)
    weights = jax.nn.softmax(jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
    # A row of padding sees nothing; its even weights would be finite, but no zero.
    weights = jnp.where(mask_BTS.any(axis=-1)[:, None, None, :, None], weights, 0.0)
    num_slots = old_BKGTS.shape[-1]
    out = _mixed(weights[..., :num_slots], past_values, v_BTKH.dtype)
    out += jnp.einsum("bkgts,bskh->btkgh", weights[..., num_slots:].astype(v_BTKH.dtype), v_BTKH)
    return NamedArray(out.reshape(q.array.shape), q.axes)


def _arrays(column: Column) -> tuple[jax.Array, jax.Array | None]:
    numbers_BKSH = column.numbers.rearrange((BATCH, KV_HEADS, KEY_POSITION, HEAD_SIZE)).array
    if column.scale is None:
        return numbers_BKSH, None
    return numbers_BKSH, column.scale.rearrange((BATCH, KV_HEADS, KEY_POSITION)).array


def _scores(q_BTKGH: jax.Array, keys: Column) -> jax.Array:
    numbers_BKSH, scale_BKS = _arrays(keys)
    scores = jnp.einsum(
        "btkgh,bksh->bkgts", q_BTKGH, numbers_BKSH.astype(q_BTKGH.dtype), preferred_element_type=jnp.float32
    )
    return scores if scale_BKS is None else scores * scale_BKS[:, :, None, None]


def _mixed(weights_BKGTS: jax.Array, values: Column, dtype: jnp.dtype) -> jax.Array:
    numbers_BKSH, scale_BKS = _arrays(values)
    if scale_BKS is not None:
        weights_BKGTS = weights_BKGTS * scale_BKS[:, :, None, None]
    return jnp.einsum("bkgts,bksh->btkgh", weights_BKGTS.astype(dtype), numbers_BKSH.astype(dtype))
