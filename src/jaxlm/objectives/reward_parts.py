"""Advantages of several rewards, each of which is normalized before they are added.

Shapes: G responses of a prompt, K rewards.
"""

import jax
import jax.numpy as jnp


def decoupled_advantages(
    parts_GK: jax.Array, weights_K: jax.Array, is_response_G: jax.Array, *, std_ddof: int, eps: float
) -> jax.Array:
    """The advantages of a whole batch, float32 [..., G]. Rewards with small differences count as much as those with large
    ones: each is normalized in its group, and their weighted sum in the batch.

    Source: GDPO (Liu et al. 2026, "Group reward-Decoupled Normalization Policy Optimization", arXiv:2601.05242).

    Args:
        parts_GK: [..., G, K], NaN where a reward does not apply. A response to which none applies has no advantage.
        is_response_G: bool [..., G]; others are padding.
        std_ddof: 0 divides sums of squares by the number of values, 1 by one less.
    """
    applies_GK = ~jnp.isnan(parts_GK) & is_response_G[..., None]
    normalized_GK = _normalized(parts_GK, applies_GK, -2, std_ddof, eps)
    is_scored_G = jnp.any(applies_GK, axis=-1)
    return _normalized(jnp.sum(normalized_GK * weights_K, axis=-1), is_scored_G, None, std_ddof, eps)


def _normalized(values: jax.Array, counts: jax.Array, axis: int | None, std_ddof: int, eps: float) -> jax.Array:
    """Values with mean 0 and standard deviation 1 over an axis, or over all; 0 where they do not count."""
    values = jnp.where(counts, values, 0.0)
    number = jnp.sum(counts, axis=axis, keepdims=True, dtype=jnp.float32)
    mean = jnp.sum(values, axis=axis, keepdims=True) / jnp.maximum(number, 1.0)
    lowest = jnp.min(jnp.where(counts, values, jnp.inf), axis=axis, keepdims=True)
    highest = jnp.max(jnp.where(counts, values, -jnp.inf), axis=axis, keepdims=True)
    # The mean of equal values may be rounded.
    centered = jnp.where(counts & (lowest < highest), values - mean, 0.0)
    variance = jnp.sum(centered**2, axis=axis, keepdims=True) / jnp.maximum(number - std_ddof, 1.0)
    return centered / (jnp.sqrt(variance) + eps)
