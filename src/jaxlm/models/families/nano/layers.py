"""Blocks of nanochat's model, and how they read value embeddings."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSpec, NamedArray

from jaxlm.core.axes import EMBED, KV_HEADS, VALUE_EMBED, VOCAB, axes_of
from jaxlm.core.products.float32_sums import rows_of
from jaxlm.core.sharding import for_compute, for_lookup
from jaxlm.models.layers import ForCache, LayerCache, LayerContext, Mlp, SelfAttention
from jaxlm.models.linear import Linear, MatrixLinear
from jaxlm.models.norms import UnweightedRMSNorm
from jaxlm.models.rope import Rotation


def uniform_linear(In: AxisSpec, Out: AxisSpec, *, std: float, key: jax.Array) -> Linear:
    """Initializes a linear layer with U(-a, a) weights of this standard deviation: a = sqrt(3) std."""
    axes, bound = hax.concat_axis_specs(Out, In), 3**0.5 * std
    return Linear(hax.random.uniform(key, axes, minval=-bound, maxval=bound), None, In, Out)


def zero_linear(In: AxisSpec, Out: AxisSpec) -> Linear:
    """Initializes a linear layer with zeros."""
    return Linear(hax.zeros(hax.concat_axis_specs(Out, In)), None, In, Out)


class ValueEmbedding(eqx.Module):
    """One layer's value embedding, which is added to its values: gate(h) * table[token], with a gate for each head.

    Source: Zhou et al. 2024 (arXiv:2410.17897), section 3, with a table per layer; the gate is nanochat's.

    Attributes:
        table: {vocab, value_embed}.
        gate: from the first features of h to the heads.
        gate_scale: largest value of the gate.
        HeadSize: features per head.
    """

    table: NamedArray
    gate: Linear | MatrixLinear
    gate_scale: float = eqx.field(static=True)
    HeadSize: Axis = eqx.field(static=True)

    def __call__(self, h: NamedArray, tokens: NamedArray) -> NamedArray:
        """Maps normalized hidden states and their tokens to {batch, position, kv_heads, head_size}."""
        gate = for_compute(self.gate)
        opened = self.gate_scale * hnn.sigmoid(gate(first_channels(h, axes_of(gate.In)[0])))
        rows = rows_of(for_lookup(self.table), VOCAB, tokens).astype(h.dtype)
        rows = hax.auto_sharded(rows.unflatten_axis(VALUE_EMBED, (opened.resolve_axis(KV_HEADS), self.HeadSize)))
        return (opened * rows).rearrange(rows.axes).astype(h.dtype)


def first_channels(h: NamedArray, Channels: Axis) -> NamedArray:
    """The first features of the residual stream."""
    return h[EMBED, 0 : Channels.size].rename({EMBED: Channels.name})


class NanoBlock(eqx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with norms without weights."""

    attn: SelfAttention
    mlp: Mlp
    norm: UnweightedRMSNorm

    def __call__(
        self,
        x: NamedArray,
        context: LayerContext,
        layer_cache: LayerCache | None,
        value: ValueEmbedding | None,
        tokens: NamedArray,
    ) -> tuple[NamedArray, ForCache]:
        """Maps {batch, position, embed} to the same shape; also returns keys and values."""
        h = self.norm(x)
        attended, new = self.attn(h, context, layer_cache, value=None if value is None else value(h, tokens))
        x = x + attended
        return x + self.mlp(self.norm(x)), new


def reversed_rotation(rotation: Rotation, dtype: jnp.dtype) -> Rotation:
    """Rotates by the opposite angle. Cosines and sines are rounded to `dtype`, and computed with in float32."""
    cos, sin = (part.astype(dtype).astype(jnp.float32) for part in (rotation.cos, rotation.sin))
    return Rotation(cos, -sin, rotation.interleaved)
