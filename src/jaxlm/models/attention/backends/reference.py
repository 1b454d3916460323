"""Attention by definition: all scores at once, [T, S] per head. The reference for the other backends."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxlm.models.attention.null_slot import NullSlot


def reference_attention(
    q_BTKGH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array,
    scale: float | jax.Array,
    dropout: float,
    key: jax.Array | None,
    rule: Callable[[jax.Array], jax.Array] = lambda scores_BKGTS: scores_BKGTS,
    null_slot: NullSlot | None = None,
) -> jax.Array:
    """Attention with any mask; returns [B, T, K, G, H].

    Shapes: B batch, T queries, S keys, K key/value heads, G query heads per key/value head, H head size.

    Args:
        mask_BTS: true if a query attends to a key.
        dropout: dropout probability of the weights; ignored without `key`.
        rule: modifies the scaled scores before the softmax.
        null_slot: that every query with a key attends to too.
    """
    scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * scale
    scores = rule(scores)
    # A finite mask value: a row without any key becomes a uniform softmax, finite in both passes, and is zeroed below.
    mask = mask_BTS[:, None, None]
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    if null_slot is not None:
        scores, v_BSKH = null_slot.joined(scores, v_BSKH)
    weights = jax.nn.softmax(scores, axis=-1)
    weights = jnp.where(mask.any(axis=-1, keepdims=True), weights, 0.0)
    if key is not None and dropout > 0:
        weights = jnp.where(jax.random.bernoulli(key, 1 - dropout, weights.shape), weights / (1 - dropout), 0.0)
    return jnp.einsum("bkgts,bskh->btkgh", weights.astype(v_BSKH.dtype), v_BSKH)
