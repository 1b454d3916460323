"""Attention as it is written down: all scores at once, [T, S] of them a head. The reference of the other backends."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def reference_attention(
    q_BTKGH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array,
    scale: float | jax.Array,
    dropout: float,
    key: jax.Array | None,
    rule: Callable[[jax.Array], jax.Array] = lambda scores_BKGTS: scores_BKGTS,
) -> jax.Array:
    """[B, T, K, G, H] for any mask; B batch, T queries, S keys, K key/value heads, G query heads each, H head size.

    Args:
        mask_BTS: true where a query may look.
        dropout: the probability of dropping a weight; without `key` nothing is dropped.
        rule: what becomes of scaled scores before the softmax.
    """
    scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * scale
    scores = rule(scores)
    # A finite floor: a row without any key becomes an even softmax, finite both ways, and is zeroed after.
    mask = mask_BTS[:, None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1)
    weights = jnp.where(mask.any(axis=-1, keepdims=True), weights, 0.0)
    if key is not None and dropout > 0:
        weights = jnp.where(jax.random.bernoulli(key, 1 - dropout, weights.shape), weights / (1 - dropout), 0.0)
    return jnp.einsum("bkgts,bskh->btkgh", weights.astype(v_BSKH.dtype), v_BSKH)
