"""The parts that transformer families share: norms, linear maps, feed-forward networks, self-attention.

Every part takes and returns named arrays and says its parameters' axes in its `init`. Parameters are float32 at first;
computation happens in whatever dtype they arrive in, except where float32 is said.
"""

from collections.abc import Callable

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSpec, NamedArray

from jaxlm.models.attention import Visibility, as_keys, attention
from jaxlm.models.cache import append
from jaxlm.models.rotary import Rotation

ACTIVATIONS: dict[str, Callable[[NamedArray], NamedArray]] = {
    "silu": hnn.silu,
    "relu": hnn.relu,
    "gelu": lambda x: hnn.gelu(x, approximate=False),
    "gelu_new": lambda x: hnn.gelu(x, approximate=True),
}
"""Activation functions by the names that Hugging Face configurations use."""


def linear(In: AxisSpec, Out: AxisSpec, *, std: float, key: jax.Array, use_bias: bool = False) -> hnn.Linear:
    """A linear map with N(0, std) weights {*Out, *In} and, if asked for, zero biases."""
    weight = hax.random.normal(key, hax.concat_axis_specs(Out, In)) * std
    return hnn.Linear(weight, hax.zeros(Out) if use_bias else None, In, Out)


def embedding(Vocab: Axis, Embed: Axis, *, std: float, key: jax.Array) -> hnn.Embedding:
    """A look-up table with N(0, std) entries."""
    return hnn.Embedding(hax.random.normal(key, (Vocab, Embed)) * std, Vocab, Embed)


class RMSNorm(eqx.Module):
    """x / rms(x) * weight, in float32.

    Source: Zhang & Sennrich 2019 (arXiv:1910.07467), equation 4.
    """

    weight: NamedArray
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(Embed: Axis, eps: float) -> "RMSNorm":
        """Weights of 1."""
        return RMSNorm(hax.ones(Embed), eps)

    def __call__(self, x: NamedArray) -> NamedArray:
        x32 = x.astype(jnp.float32)
        scale = hax.rsqrt(hax.mean(x32 * x32, self.weight.axes) + self.eps)
        return (x32 * scale * self.weight.astype(jnp.float32)).astype(x.dtype)


class LayerNorm(eqx.Module):
    """(x - mean) / std * weight + bias, in float32.

    Source: Ba et al. 2016 (arXiv:1607.06450), equations 3 and 4.
    """

    weight: NamedArray
    bias: NamedArray | None
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(Embed: Axis, eps: float, *, use_bias: bool) -> "LayerNorm":
        """Weights of 1, biases of 0."""
        return LayerNorm(hax.ones(Embed), hax.zeros(Embed) if use_bias else None, eps)

    def __call__(self, x: NamedArray) -> NamedArray:
        x32 = x.astype(jnp.float32)
        centred = x32 - hax.mean(x32, self.weight.axes)
        scale = hax.rsqrt(hax.mean(centred * centred, self.weight.axes) + self.eps)
        out = centred * scale * self.weight.astype(jnp.float32)
        if self.bias is not None:
            out = out + self.bias.astype(jnp.float32)
        return out.astype(x.dtype)


def dropout(x: NamedArray, probability: float, key: jax.Array | None) -> NamedArray:
    """Zeroes entries with `probability` and scales the others up; without a key, the identity."""
    return hnn.dropout(x, probability, inference=key is None, key=key)


class Mlp(eqx.Module):
    """Embed to mlp, activation, mlp to embed (Vaswani et al. 2017, equation 2)."""

    up_proj: hnn.Linear
    down_proj: hnn.Linear
    activation: str = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        return self.down_proj(ACTIVATIONS[self.activation](self.up_proj(x)))


class GatedMlp(eqx.Module):
    """The activation of one projection times another (Shazeer 2020, arXiv:2002.05202, equation 6: SwiGLU with silu)."""

    gate_proj: hnn.Linear
    up_proj: hnn.Linear
    down_proj: hnn.Linear
    activation: str = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


class KeysValues(eqx.Module):
    """One layer's keys and values, {batch, position or key_position, kv_heads, head_size}."""

    keys: NamedArray
    values: NamedArray


class Context(eqx.Module):
    """What every layer of one forward pass shares.

    Attributes:
        visibility: who attends to whom.
        rotation: of queries and keys, for the families that rotate.
        cached: the number of cache slots in use; None without a cache.
    """

    visibility: Visibility
    rotation: Rotation | None = None
    cached: jax.Array | None = None


class SelfAttention(eqx.Module):
    """Multi-head attention of a sequence to itself, and to what the cache holds.

    Attributes:
        q_proj: {heads, head_size, embed}.
        k_proj, v_proj: {kv_heads, head_size, embed}.
        o_proj: {embed, heads, head_size}.
        upcast: attend in float32 from the scores to the weighted values.
        dropout: of attention weights.
    """

    q_proj: hnn.Linear
    k_proj: hnn.Linear
    v_proj: hnn.Linear
    o_proj: hnn.Linear
    upcast: bool = eqx.field(static=True, default=False)
    dropout: float = eqx.field(static=True, default=0.0)

    def __call__(
        self,
        x: NamedArray,
        context: Context,
        past: KeysValues | None,
        *,
        scale: float | jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> tuple[NamedArray, KeysValues]:
        """{batch, position, embed} to the same, and this call's own keys and values."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if context.rotation is not None:
            q, k = context.rotation(q), context.rotation(k)
        new = KeysValues(k, v)
        if past is None:
            k, v = as_keys(k), as_keys(v)
        else:
            assert context.cached is not None
            k, v = append(past.keys, k, context.cached), append(past.values, v, context.cached)
        if self.upcast:
            q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
        out = attention(q, k, v, context.visibility, scale=scale, dropout=self.dropout, key=key)
        return self.o_proj(hax.auto_sharded(out.astype(x.dtype))), new
