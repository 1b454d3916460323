"""Samples the next token from logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxlm.core.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Sampling options.

    Attributes:
        temperature: logits are divided by this number; 0 is greedy decoding.
        top_k: sample from the k most likely tokens only; None samples from all.
        top_p: nucleus sampling (Holtzman et al. 2020, arXiv:1904.09751, section 3.1): sample from the fewest most
            likely tokens with at least this total probability, after `top_k`; None samples from all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ConfigError(f"temperature: {self.temperature} given, 0 (greedy) or more expected")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k: {self.top_k} given, 1 or more expected. Remove it to sample from all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p: {self.top_p} given, more than 0 and at most 1 expected. Remove it to sample from all tokens"
            )

    def draw(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """Samples one token per row, int32 [rows], from float32 [rows, vocab] logits and [rows] keys."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if self.top_k is None and self.top_p is None:
            return jax.vmap(jax.random.categorical)(keys, logits / self.temperature).astype(jnp.int32)
        order = jnp.argsort(logits, axis=-1, descending=True)
        ranked = jnp.take_along_axis(logits, order, axis=-1) / self.temperature
        if self.top_k is not None:
            ranked = jnp.where(jnp.arange(ranked.shape[-1]) < self.top_k, ranked, -jnp.inf)
        if self.top_p is not None:
            probabilities = jax.nn.softmax(ranked, axis=-1)
            mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
            ranked = jnp.where(mass_before < self.top_p, ranked, -jnp.inf)
        rank = jax.vmap(jax.random.categorical)(keys, ranked)
        return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0].astype(jnp.int32)
