"""Blocks of nanochat's model, how they read value embeddings, and the smear of previous tokens' embeddings.

`FEBRUARY_2026` and `JULY_2026` say what nanochat computes in the two revisions that the model covers, as fields of
`NanoConfig`.

Source: karpathy/nanochat (`nanochat/gpt.py`): commit b7629ef of February 2026, and revision 92d63d4 of July 2026.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSpec, NamedArray

from jaxlm.core.axes import BATCH, EMBED, KEY_POSITION, KV_HEADS, POSITION, VALUE_EMBED, VOCAB, axes_of
from jaxlm.core.parameters import VECTOR, DeclaresParameters, Parameter
from jaxlm.core.products.float32_sums import rows_of
from jaxlm.core.sharding import for_compute, for_lookup
from jaxlm.core.values.permutation import previous
from jaxlm.models.base import Inputs
from jaxlm.models.inference.cache import DecodingCache, UnstackedCache
from jaxlm.models.layers import Mlp
from jaxlm.models.linear import Linear, MatrixLinear
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.mixers.base import ForCache, LayerCache, LayerContext
from jaxlm.models.norms import UnweightedRMSNorm
from jaxlm.models.rope import DefaultRotary, Rotation

FEBRUARY_2026: dict[str, Any] = {
    "short_window_fraction": 0.5,
    "short_window_multiple": None,
    "rope": DefaultRotary(theta=10_000.0),
    "qk_scale": 1.0,
    "value_gate_channels": 32,
    "value_gate_scale": 2.0,
    "smear_channels": 0,
    "backout": None,
}
JULY_2026: dict[str, Any] = {
    "short_window_fraction": 0.25,
    "short_window_multiple": 128,
    "rope": DefaultRotary(theta=100_000.0),
    "qk_scale": 1.2,
    "value_gate_channels": 12,
    "value_gate_scale": 3.0,
    "smear_channels": 24,
    "backout": 0.2,
}


def previous_embeddings(
    x: NamedArray,
    inputs: Inputs,
    cache: DecodingCache | UnstackedCache | None,
    embedded: Callable[[NamedArray], NamedArray],
) -> NamedArray:
    """The embedding of the token before each token, {batch, position, embed}; 0 for the first token of a document.

    Args:
        x: embeddings of the inputs.
        cache: holds the tokens before the inputs.
        embedded: embeds tokens.
    """
    segments = inputs.segment_ids
    axes = (segments.resolve_axis(BATCH), segments.resolve_axis(POSITION), x.resolve_axis(EMBED))
    First = axes[1].resize(1)
    x, segments = x.rearrange(axes), segments.rearrange(axes[:2])
    if cache is None or cache.tokens is None:
        first, first_segment = 0, 0
    else:
        token, first_segment = (_slot_before(slots, cache.length, First) for slots in (cache.tokens, cache.segment_ids))
        first = embedded(token).rearrange((axes[0], First, axes[2]))
    before, before_segments = previous(x, inputs.order, first), previous(segments, inputs.order, first_segment)
    same = NamedArray((before_segments.array == segments.array) & (segments.array != 0), segments.axes)
    return hax.where(same, before, 0.0).rearrange(axes).astype(x.dtype)


def _slot_before(slots: NamedArray, length: jax.Array, First: Axis) -> NamedArray:
    """The last slot in use, {batch, position}; of an empty cache, its first slot, which has segment 0."""
    slots = slots.rearrange((BATCH, KEY_POSITION))
    array = jax.lax.dynamic_slice_in_dim(slots.array, jnp.maximum(length - 1, 0), 1, axis=1)
    return NamedArray(array, (slots.axes[0], First))


def uniform_linear(In: AxisSpec, Out: AxisSpec, *, std: float, key: jax.Array) -> Linear:
    """Initializes a linear layer with U(-a, a) weights of this standard deviation: a = sqrt(3) std."""
    axes, bound = hax.concat_axis_specs(Out, In), 3**0.5 * std
    return Linear(hax.random.uniform(key, axes, minval=-bound, maxval=bound), None, In, Out)


def zero_linear(In: AxisSpec, Out: AxisSpec) -> Linear:
    """Initializes a linear layer with zeros."""
    return Linear(hax.zeros(hax.concat_axis_specs(Out, In)), None, In, Out)


class ValueEmbedding(DeclaresParameters):
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

    def parameters(self) -> dict[str, Parameter]:
        return {"table": VECTOR}


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
