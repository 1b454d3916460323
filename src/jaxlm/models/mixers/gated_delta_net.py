"""Gated DeltaNet: a short convolution over queries, keys and values, the gated delta rule, and a norm with a gate.

Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks" (arXiv:2412.06464), figure 1. The layers that use it:
Qwen3-Next and Qwen3.5 (Qwen team 2025); with factors up to 2: OLMo Hybrid (Ai2 2026), after Grazzi et al. 2024
(arXiv:2411.12537).

Shapes: as in `delta_rule`; W taps of the convolution.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import ad_checkpoint

from jaxlm.core.axes import BATCH, CONV_TAPS, HEAD_SIZE, POSITION, STATE_GROUP, STATE_HEADS, STATE_KEY, axes_of
from jaxlm.core.parameters import FLOAT32_VECTOR, VECTOR, DeclaresParameters, Parameter
from jaxlm.models.attention.backends.blockwise import ATTENTION
from jaxlm.models.flops import MixerWork
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.base import LayerCache, LayerContext, Mixer
from jaxlm.models.mixers.delta_rule import (
    DeltaState,
    Tokens,
    delta_rule,
    last_segment,
    transition,
    unit_vectors,
    unpadded,
)
from jaxlm.models.mixers.shared_rows import SharedRows
from jaxlm.models.norms import RMSNorm
from jaxlm.models.remat import KEY, QUERY, VALUE, checkpoint_name


class DeltaCache(LayerCache):
    """What the layer keeps of earlier tokens: the last inputs of the convolution, and the state.

    Attributes:
        q, k, v: float32 {batch, conv_taps, ...}, as the projections return them, of the last tokens that were no padding.
        segments: int32 {batch, conv_taps}, their documents; 0 for none.
        memory: float32 {batch, state_heads, state_group, state_key, head_size}.
    """

    q: NamedArray
    k: NamedArray
    v: NamedArray
    segments: NamedArray
    memory: NamedArray

    def extended(self, new: "DeltaCache", start: jax.Array | None) -> "DeltaCache":
        return new

    def flattened(self) -> "DeltaCache":
        return self

    def unflattened(self, Batch: Axis) -> "DeltaCache":
        return self

    def arrays(self, axes: "Kept") -> "Kept":
        """Without axis names. Args: axes: of each array."""
        leaves = (self.q, self.k, self.v, self.segments, self.memory)
        return Kept._make(leaf.rearrange(order).array for leaf, order in zip(leaves, axes, strict=True))


class Kept(NamedTuple):
    """The arrays of a `DeltaCache` of one layer, or the dimension of their heads."""

    q: Any
    k: Any
    v: Any
    segments: Any
    memory: Any


_HEAD_DIMS = Kept(2, 2, 2, 0, 1)


class GatedDeltaNet(Mixer, DeclaresParameters):
    """A mixer whose state has a fixed size, whatever the length of the text.

    Value heads have two axes: those of a `state_group` read the same head of queries and keys.

    Attributes:
        q_proj, k_proj: {state_heads, state_key, embed}.
        v_proj, gate_proj: {state_heads, state_group, head_size, embed}.
        decay_proj, beta_proj: {state_heads, state_group, embed}.
        o_proj: {embed, state_heads, state_group, head_size}.
        q_conv, k_conv, v_conv: {.., conv_taps}, depthwise; the last tap meets the token itself.
        A_log, dt_bias: {state_heads, state_group}. A token decays the state by exp(-rate softplus(a + bias)).
        norm: over each value head, before its gate.
        max_beta: how far a token moves what the state has for its key towards its value is between 0 and this; 1 is all the
            way.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    gate_proj: Linear
    decay_proj: Linear
    beta_proj: Linear
    o_proj: Linear
    q_conv: NamedArray
    k_conv: NamedArray
    v_conv: NamedArray
    A_log: NamedArray
    dt_bias: NamedArray
    norm: RMSNorm
    max_beta: float = eqx.field(static=True, default=1.0)

    def __call__(
        self, x: NamedArray, context: LayerContext, cache: DeltaCache | None, *, key: jax.Array | None = None
    ) -> tuple[NamedArray, DeltaCache]:
        segments = context.attention_mask.segment_ids
        x = hax.where(segments != 0, x, 0).rearrange(x.axes).astype(x.dtype)
        Batch, Pos, (Heads, Group, _, ValueSize) = x.resolve_axis(BATCH), x.resolve_axis(POSITION), self._axes
        by_token = lambda layer: layer(x).rearrange((BATCH, POSITION, *axes_of(layer.Out))).array  # noqa: E731
        rate, bias = (a.rearrange((Heads, Group)).array.astype(jnp.float32) for a in (self.A_log, self.dt_bias))
        decay, beta = (by_token(layer).astype(jnp.float32) for layer in (self.decay_proj, self.beta_proj))
        projected = zip(map(by_token, (self.q_proj, self.k_proj, self.v_proj)), (QUERY, KEY, VALUE), strict=True)
        q, k, v = (ad_checkpoint.checkpoint_name(x, name) for x, name in projected)
        g, beta = -jnp.exp(rate) * jax.nn.softplus(decay + bias), self.max_beta * jax.nn.sigmoid(beta)
        tokens = Tokens(q, k, v, g, beta, segments.rearrange((BATCH, POSITION)).array)
        convs = [
            conv.rearrange((STATE_HEADS, ..., CONV_TAPS)).array for conv in (self.q_conv, self.k_conv, self.v_conv)
        ]
        order = None if context.order is None else context.order.rearrange((BATCH, POSITION)).array
        earlier = None if cache is None else cache.arrays(self._cache_axes(Batch))
        num_before = self.q_conv.axis_size(CONV_TAPS) - 1
        ordered, continued = order is not None, cache is not None
        devices = SharedRows.of(Batch, Pos, Heads, num_before=num_before, ordered=ordered, continued=continued)
        function = functools.partial(mixed, devices)
        out, later = devices.run(function, tokens, convs, order, earlier, _HEAD_DIMS)
        out = checkpoint_name(hax.auto_sharded(NamedArray(out, (Batch, Pos, Heads, Group, ValueSize))), ATTENTION)
        gate = jax.nn.silu(by_token(self.gate_proj).astype(jnp.float32))
        out = NamedArray((self.norm(out).array * gate).astype(x.dtype), out.axes)
        return self.o_proj(hax.auto_sharded(out)), DeltaCache(*map(NamedArray, later, self._cache_axes(Batch)))

    def init_cache(self, Batch: Axis, capacity: int, dtype: Any) -> DeltaCache:
        dtypes = (jnp.float32, jnp.float32, jnp.float32, jnp.int32, jnp.float32)
        return DeltaCache(*(hax.zeros(axes, kind) for axes, kind in zip(self._cache_axes(Batch), dtypes, strict=True)))

    @property
    def takes_order(self) -> bool:
        return True

    def work(self, window: int | None) -> MixerWork:
        """24 FLOPs for each entry of a state, as Megatron-LM counts, and those of the weights of the convolution."""
        entries = math.prod(axis.size for axis in self._axes)
        return MixerWork(others=24 * entries + 6 * (self.q_conv.size + self.k_conv.size + self.v_conv.size))

    def parameters(self) -> dict[str, Parameter]:
        convs = ("q_conv", "k_conv", "v_conv")
        return {**dict.fromkeys(convs, VECTOR), **dict.fromkeys(("A_log", "dt_bias"), FLOAT32_VECTOR)}

    @property
    def _axes(self) -> tuple[Axis, Axis, Axis, Axis]:
        """Heads of keys, value heads of each, features of a key and of a value."""
        sizes = {axis.name: axis for layer in (self.q_proj, self.v_proj) for axis in axes_of(layer.Out)}
        return sizes[STATE_HEADS], sizes[STATE_GROUP], sizes[STATE_KEY], sizes[HEAD_SIZE]

    def _cache_axes(self, Batch: Axis) -> Kept:
        Heads, Group, KeySize, ValueSize = self._axes
        taps = self.q_conv.resolve_axis(CONV_TAPS)
        keys = (Batch, Before := taps.resize(taps.size - 1), Heads, KeySize)
        values, memory = (Batch, Before, Heads, Group, ValueSize), (Batch, Heads, Group, KeySize, ValueSize)
        return Kept(keys, keys, values, (Batch, Before), memory)


def mixed(
    devices: SharedRows, tokens: Tokens, convs: Sequence[jax.Array], order: jax.Array | None, earlier: Kept | None
) -> tuple[jax.Array, Kept]:
    """The convolution and the rule on one device; returns [B, T, K, R, V] and what later tokens need.

    Args:
        tokens: q and k as they are projected.
        convs: [K, .., W], of queries, keys and values.
        order: as in `Inputs`.
        earlier: what earlier tokens have left; None if there are none.
    """
    tokens = jax.tree.map(devices.whole_rows, tokens)
    convs = [devices.own_heads(conv) for conv in convs]
    order = None if order is None or devices.passed else devices.whole_rows(order)
    if order is not None:
        tokens = jax.tree.map(functools.partial(_taken, places=jnp.argsort(order, axis=1)), tokens)
    tokens = jax.tree.map(devices.pieces, tokens)
    num_before = convs[0].shape[-1] - 1
    inputs = (*tokens[:3], tokens.segments)
    if earlier is None:
        last = [_last(x, num_before) for x in inputs]
        before = [devices.before(x, jnp.zeros_like(devices.in_text(x)[0])) for x in last]
        padded = [jnp.concatenate(pair, axis=1) for pair in zip(before, inputs, strict=True)]
        fill, back = padded, None
    else:
        padded = [jnp.concatenate([one.astype(x.dtype), x], axis=1) for one, x in zip(earlier, inputs, strict=False)]
        # Padding between the earlier tokens and these is not in the way of the convolution.
        places = jnp.argsort(padded[3] != 0, axis=1, stable=True)
        padded = [_taken(x, places) for x in padded]
        back = jnp.argsort(places, axis=1)[:, num_before:]
        fill = [jnp.pad(x, [(0, 0), (num_before, 0)] + [(0, 0)] * (x.ndim - 2)) for x in padded]
    lengths = (fill[0].shape[-1] ** -0.5, 1.0)
    q, k = (_directions(x, conv, fill[3], n) for x, conv, n in zip(fill, convs, lengths, strict=False))
    v = convolved(fill[2], convs[2], fill[3])
    if back is not None:
        q, k, v = (_taken(x, back) for x in (q, k, v))
    rule = Tokens(q, k, v, *tokens[3:])
    start = None if earlier is None else DeltaState(earlier.memory, earlier.segments[:, -1])
    if devices.passed:
        start = passed_state(devices, rule)
    out, state = delta_rule(rule, start)
    # The last tokens that are no padding, behind all others.
    places = jnp.argsort(padded[3] != 0, axis=1, stable=True)[:, -num_before:]
    kept = Kept._make((*(_taken(x, places) for x in padded), state.memory))
    floats = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    later = jax.tree.map(lambda x: floats(devices.in_text(x)[-1]), kept)
    out = devices.joined(out)
    return devices.own_tokens(out if order is None else _taken(out, order)), later


def passed_state(devices: SharedRows, tokens: Tokens) -> DeltaState:
    """The state before each of the device's pieces, after the pieces before it in the text."""
    nothing = jnp.zeros_like(devices.in_text(tokens.segments[:, 0])[0])
    last = devices.in_text(last_segment(tokens.segments, jnp.zeros_like(tokens.segments[:, 0])))  # [pieces, B]
    segments = jnp.concatenate([nothing[None], unpadded(last.T, nothing).T[:-1]])
    segment = devices.own_pieces(segments)
    maps = [devices.in_text(x) for x in transition(tokens, segment)]

    def step(memory, of_piece):
        M, B = of_piece
        return jnp.matmul(M, memory, precision=jax.lax.Precision.HIGHEST) + B, memory

    _, starts = jax.lax.scan(step, jnp.zeros_like(maps[1][0]), maps)
    return DeltaState(devices.own_pieces(starts), segment)


# XLA for GPUs would save the float32 sums for the gradient of the norm, which values do not have. Reading their inputs again
# takes less time.
@jax.checkpoint
def _directions(x: jax.Array, conv: jax.Array, segments: jax.Array, length: float) -> jax.Array:
    """Queries or keys as vectors of this length. Args: as those of `convolved`."""
    out = convolved(x, conv, segments)
    return (unit_vectors(out) * length).astype(out.dtype)


def convolved(x: jax.Array, conv: jax.Array, segments: jax.Array) -> jax.Array:
    """silu of the sums over a token and the W - 1 before it in its document, in float32.

    Args:
        x: [B, W - 1 + T, K, ..], with earlier tokens in front.
        conv: [K, .., W].
        segments: [B, W - 1 + T].
    """
    num_taps = conv.shape[-1]
    length = x.shape[1] - num_taps + 1
    own = segments[:, num_taps - 1 :]
    total = jnp.zeros((), jnp.float32)
    for tap in range(num_taps):
        part = jax.lax.slice_in_dim(x, tap, tap + length, axis=1).astype(jnp.float32)
        same = (segments[:, tap : tap + length] == own).reshape(*own.shape, *[1] * (x.ndim - 2))
        total = total + jnp.where(same, part * conv[..., tap].astype(jnp.float32), 0)
    return jax.nn.silu(total).astype(x.dtype)


def _last(x: jax.Array, count: int) -> jax.Array:
    """The last entries of [B, T, ..], after zeros if there are fewer."""
    missing = max(0, count - x.shape[1])
    return jnp.pad(x, [(0, 0), (missing, 0)] + [(0, 0)] * (x.ndim - 2))[:, -count:]


def _taken(x: jax.Array, places: jax.Array) -> jax.Array:
    """[B, S, ..] of [B, T, ..] at places [B, S]."""
    return jnp.take_along_axis(x, places.reshape(*places.shape, *[1] * (x.ndim - 2)), axis=1)
