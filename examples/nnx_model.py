"""A small transformer in Flax NNX that names the axes of its parameters. `factory: examples.nnx_model:make`."""

import jax
import jax.numpy as jnp
from flax import nnx


def make(vocab_size: int, seq_len: int, *, width: int = 64, depth: int = 2, heads: int = 4, dropout: float = 0.0, rngs):
    """Builds the module. jaxlm fills in `vocab_size`, `seq_len` and `rngs`."""
    return Transformer(vocab_size, seq_len, width, depth, heads, dropout, rngs)


def named(*axes: str | None):
    """A parameter initializer that names the axes of its arrays."""
    return nnx.with_partitioning(nnx.initializers.normal(0.02), axes)


def norm(width: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(width, scale_init=nnx.with_partitioning(nnx.initializers.ones, ("embed",)), rngs=rngs)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, dropout: float, rngs: nnx.Rngs):
        self.heads = heads
        self.attn_norm, self.mlp_norm = norm(width, rngs), norm(width, rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, kernel_init=named("embed", "qkv"), rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, kernel_init=named("heads", "embed"), rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, kernel_init=named("mlp", "embed"), rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        q, k, v = (part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(self.qkv(self.attn_norm(x)), 3, -1))
        attended = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
        x = x + self.dropout(self.out(attended.reshape(x.shape)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.mlp_norm(x)))))


class Transformer(nnx.Module):
    """Int tokens [batch, position] to logits [batch, position, vocab].

    It takes `segment_ids` and `positions`, so packed documents do not attend to each other.
    """

    def __init__(
        self, vocab_size: int, seq_len: int, width: int, depth: int, heads: int, dropout: float, rngs: nnx.Rngs
    ):
        self.tokens = nnx.Embed(vocab_size, width, embedding_init=named("vocab", "embed"), rngs=rngs)
        self.places = nnx.Embed(seq_len, width, embedding_init=named("place", "embed"), rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, dropout, rngs) for _ in range(depth)])
        self.final_norm = norm(width, rngs)

    def __call__(self, tokens: jax.Array, *, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        earlier = jnp.tri(tokens.shape[1], dtype=bool)
        mask = earlier & (segment_ids[:, :, None] == segment_ids[:, None, :])
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.tokens.attend(self.final_norm(x))
