"""A small transformer in Flax Linen. It has no axis names; the YAML adds them. `factory: examples.linen_model:make`."""

import flax.linen as nn
import jax
import jax.numpy as jnp


def make(vocab_size: int, *, width: int = 64, depth: int = 2, heads: int = 4, dropout: float = 0.0) -> nn.Module:
    """Builds the module. jaxlm fills in `vocab_size`."""
    return Transformer(vocab_size, width, depth, heads, dropout)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Positions enter through a bias against distant keys."""

    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        width, length = x.shape[-1], x.shape[1]
        distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
        slopes = 2.0 ** -jnp.arange(1, self.heads + 1)
        bias = jnp.where(distance >= 0, -slopes[:, None, None] * distance, -1e30)
        q, k, v = (
            nn.DenseGeneral((self.heads, width // self.heads), use_bias=False, name=name)(
                nn.RMSNorm(name=f"{name}_norm")(x)
            )
            for name in ("query", "key", "value")
        )
        attended = jax.nn.dot_product_attention(q, k, v, bias=bias[None].astype(q.dtype))
        x = x + nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, name="out")(attended)
        up = nn.gelu(nn.Dense(4 * width, use_bias=False, name="up")(nn.RMSNorm(name="mlp_norm")(x)))
        return x + nn.Dropout(self.dropout, deterministic=not train)(nn.Dense(width, use_bias=False, name="down")(up))


class Transformer(nn.Module):
    """Int tokens [batch, position] to logits [batch, position, vocab]."""

    vocab_size: int
    width: int
    depth: int
    heads: int
    dropout: float

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Embed(self.vocab_size, self.width, name="tokens")(tokens)
        for number in range(self.depth):
            x = Block(self.heads, self.dropout, name=f"block_{number}")(x, train=train)
        return nn.Dense(self.vocab_size, use_bias=False, name="head")(nn.RMSNorm(name="final_norm")(x))
