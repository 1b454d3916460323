"""One more thing to attend to, which is not a token: the null slot, and the attention sink, which is one without a value.

Source: attention sinks as learned scores: OpenAI 2025, gpt-oss model card (arXiv:2508.10925), section 2.2.

A kernel need not know of a sink. Its output o and the logsumexp l of its scores give those with a sink of score s:
L = log(e^l + e^s), o' = o e^(l - L). The kernel's backward pass, given o' and L in place of o and l, returns the gradients of
queries, keys and values, because it makes the weights from L and subtracts the sum over features of o' times its gradient.
The gradient of s is minus that sum times e^(s - L).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import BATCH, HEAD_SIZE, HEADS, KV_HEADS, POSITION


class NullSlot(eqx.Module):
    """A score, and maybe a value, beside those of the keys, for every token that attends to a key.

    Attributes:
        scores: float32 {heads}, or {batch, position, heads}; not scaled further.
        values: {kv_heads, head_size}; None for 0, which all backends support if the scores are by head: a sink.
    """

    scores: NamedArray
    values: NamedArray | None = None

    @property
    def is_sink(self) -> bool:
        return self.values is None and not self.scores.has_axis(POSITION)

    def sink_KG(self, kv_heads: int) -> jax.Array:
        """The scores of a sink, [K, G]. Args: kv_heads: number of them."""
        assert self.is_sink
        return self.scores.array.reshape(kv_heads, -1)

    def joined(self, scores_BKGTS: jax.Array, v_BSKH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Scores and values with those of the slot after the last key."""
        *rows, kv_heads, size = v_BSKH.shape
        if self.scores.has_axis(POSITION):
            own_BTN = self.scores.rearrange((BATCH, POSITION, HEADS)).array
            own = own_BTN.reshape(*own_BTN.shape[:2], kv_heads, -1).transpose(0, 2, 3, 1)[..., None]
        else:
            own = self.scores.array.reshape(kv_heads, -1, 1, 1)
        values = (
            jnp.zeros((kv_heads, size), v_BSKH.dtype)
            if self.values is None
            else self.values.rearrange((KV_HEADS, HEAD_SIZE)).array.astype(v_BSKH.dtype)
        )
        own = jnp.broadcast_to(own, (*scores_BKGTS.shape[:-1], 1))
        values = jnp.broadcast_to(values, (rows[0], 1, kv_heads, size))
        return jnp.concatenate([scores_BKGTS, own], axis=-1), jnp.concatenate([v_BSKH, values], axis=1)


def add_sink(lse: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logsumexp with a sink, and the factor of an output without it.

    Args:
        lse: float32, of each query's scores.
        sink: float32, broadcast to it.
    """
    whole = jnp.logaddexp(lse, sink)
    return whole, jnp.exp(lse - whole)


def sink_gradient(sink: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """The gradient of the sink through each query, float32.

    Args:
        lse: with the sink.
        delta: the sum over features of the output times its gradient; 0 for queries that see no key.
    """
    return jnp.where(delta == 0, 0.0, -jnp.exp(sink - lse) * delta)
