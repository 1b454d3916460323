"""Decoupled bottleneck attention (DBA): scores of what tokens mean and of where they are, in one softmax.

Source: caramba's `layer/attention/decoupled.py`, with keys and values per key/value head (Ainslie et al. 2023,
arXiv:2305.13245), so that the cache of a grouped model becomes smaller and not larger. Several value heads may share a key
(Meng et al. 2025, TransMLA, arXiv:2502.07864), which the cache then has once. With d_s semantic and d_g geometric features
in a head,

    score = 2 g <q_s, k_s> / sqrt(d_s) + (2 - 2 g) <R q_g, R k_g> / sqrt(d_g)

R is a rotary embedding, and g a gate for each query head, 1/2 without one. Both terms are one product of concatenated
queries and keys.
"""

import math
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core.axes import HEAD_SIZE, HEADS, KEY_HEADS, KV_HEADS, QUERY_GROUP, ROTARY_PAIRS, axes_of
from jaxlm.core.parameters import SCALE, DeclaresParameters, Parameter
from jaxlm.models.attention.api import AttentionSpec, as_keys, attention
from jaxlm.models.attention.choose import AttentionTask
from jaxlm.models.attention.null_slot import NullSlot
from jaxlm.models.attention.sharding import AttentionSharding
from jaxlm.models.flops import MixerWork
from jaxlm.models.inference.cached_attention import cached_attention
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.attention import Attention
from jaxlm.models.mixers.base import ForCache, LayerContext
from jaxlm.models.mixers.key_values import KeyValue, KeyValueCache
from jaxlm.models.remat import KEY, QUERY, VALUE, checkpoint_name
from jaxlm.models.rope import Places, RotaryConfig, Rotation


class Gate(DeclaresParameters):
    """Weights the semantic part of a query head's score: sigmoid of a logit, and of a product with the input if dynamic.

    Attributes:
        logits: {heads}.
        proj: {heads, embed}; None for a gate that does not depend on the input.
    """

    logits: NamedArray
    proj: Linear | None

    @staticmethod
    def init(Heads: Axis, Embed: Axis, *, dynamic: bool) -> "Gate":
        """A gate of 1/2."""
        proj = Linear(hax.zeros((Heads, Embed)), None, Embed, Heads) if dynamic else None
        return Gate(hax.zeros(Heads), proj)

    def __call__(self, x: NamedArray) -> NamedArray:
        """{heads}, or {batch, position, heads}; float32."""
        logits = self.logits.astype(jnp.float32)
        return hax.nn.sigmoid(logits if self.proj is None else logits + self.proj(x).astype(jnp.float32))

    def parameters(self) -> dict[str, Parameter]:
        return {"logits": SCALE}


class LearnedSlot(DeclaresParameters):
    """A key and a value that do not come from a token. The key has no position: queries meet it without their rotation.

    Attributes:
        keys: {kv_heads or key_heads, head_size}, semantic features before geometric ones.
        values: {kv_heads, head_size}.
    """

    keys: NamedArray
    values: NamedArray

    def for_queries(self, q: NamedArray) -> NullSlot:
        """Args: q: {batch, position, heads, head_size}, without rotation, with the factors of the scores."""
        KeyHeads, _ = self.keys.axes
        grouped = _grouped(q, KeyHeads)
        scores = hax.dot(grouped, self.keys.astype(q.dtype), axis=HEAD_SIZE, preferred_element_type=jnp.float32)
        return NullSlot(scores.flatten_axes((KeyHeads.name, QUERY_GROUP), HEADS), self.values)

    def parameters(self) -> dict[str, Parameter]:
        return {"keys": SCALE, "values": SCALE}


class DecoupledAttention(Attention):
    """Decoupled bottleneck attention. A head without semantic, or without geometric features has no layers for them.

    Attributes:
        q_sem, q_geo: {heads, head_size, embed}, with d_s and d_g features.
        k_sem, k_geo: {kv_heads, head_size, embed}, likewise; {key_heads, head_size, embed} if value heads share keys. With
            `tie_qk`, `k_sem` is None and keys are queries.
        v_proj: {kv_heads, head_size, embed}, with a head size of its own.
        o_proj: {embed, heads, head_size}.
        pairs: int32 {kv_heads or key_heads, rotary_pairs}, the number of the rotary frequency of each pair of geometric
            features. They are frequencies of `TransformerConfig.RotarySize` features, such as a teacher's. None without
            geometric features.
        gate: None for g = 1/2.
        null_slot: one more key and value that every token attends to; None for none.
        semantic_rope: rotates semantic features too, by frequencies of d_s features; None does not.
    """

    q_sem: Linear | None
    k_sem: Linear | None
    q_geo: Linear | None
    k_geo: Linear | None
    v_proj: Linear
    o_proj: Linear
    pairs: NamedArray | None
    gate: Gate | None = None
    null_slot: LearnedSlot | None = None
    semantic_rope: RotaryConfig | None = eqx.field(static=True, default=None)

    def task(
        self, platform: str, capability: tuple[int, int] | None, dtype: jnp.dtype, seq_len: int, window: int | None
    ) -> AttentionTask:
        sizes = {axis.name: axis.size for axis in axes_of(self.v_proj.Out)}
        heads = {axis.name: axis.size for axis in axes_of(self.o_proj.In)}
        return AttentionTask(
            platform,
            dtype,
            seq_len,
            head_size=_size(self.q_sem) + _size(self.q_geo),
            value_size=sizes[HEAD_SIZE],
            group=heads[HEADS] // sizes[KV_HEADS],
            window=window,
            capability=capability,
            null_slot=self.null_slot is not None,
        )

    def __call__(
        self,
        x: NamedArray,
        context: LayerContext,
        cache: Any,
        *,
        key: jax.Array | None = None,
    ) -> tuple[NamedArray, ForCache]:
        parts = zip(*self._parts(x, context), strict=True)
        unrotated, q, k = (hax.concatenate(HEAD_SIZE, part) for part in parts)
        v = self.v_proj(x)
        q, k, v = checkpoint_name(q, QUERY), checkpoint_name(k, KEY), checkpoint_name(v, VALUE)
        new: ForCache = KeyValue(k, v)
        if cache is not None and context.start is not None:
            new = cache = cache.extended(new, context.start)
        spec = AttentionSpec(
            context.attention_mask,
            scale=1.0,
            null_slot=None if self.null_slot is None else self.null_slot.for_queries(unrotated),
            window=context.window,
            backend=context.attn_backend,
            sharding=AttentionSharding.of(q, v),
        )
        if cache is None:
            out = attention(q, as_keys(_for_each_value(k, v.resolve_axis(KV_HEADS))), as_keys(v), spec)
        else:
            out = cached_attention(q, k, v, cache.keys, cache.values, spec)
        return self.o_proj(hax.auto_sharded(out.astype(x.dtype))), new

    def init_cache(self, Batch: Axis, capacity: int, dtype: Any) -> KeyValueCache:
        keys = next(layer for layer in (self.k_sem, self.k_geo, self.q_sem) if layer is not None)
        (Heads,) = (axis for axis in axes_of(keys.Out) if axis.name != HEAD_SIZE)
        Heads = Heads.alias(KV_HEADS) if Heads.name == HEADS else Heads  # keys that are queries
        Keys = (Heads, Axis(HEAD_SIZE, _size(self.q_sem) + _size(self.q_geo)))
        return KeyValueCache.empty(Batch, capacity, Keys, self.v_proj.Out, dtype)

    def work(self, window: int | None) -> MixerWork:
        heads, value_size = (axis.size for axis in axes_of(self.o_proj.In))
        return MixerWork(heads * (_size(self.q_sem) + _size(self.q_geo) + value_size) // 2, window)

    def _parts(self, x: NamedArray, context: LayerContext) -> Iterator[tuple[NamedArray, NamedArray, NamedArray]]:
        """The semantic and the geometric part of queries without and with rotation, and of keys, {.., head_size}.

        The factors of both scores are in the queries.
        """
        gate = None if self.gate is None else self.gate(x)
        if self.q_sem is not None:
            q = self.q_sem(x)
            k = q.rename({HEADS: KV_HEADS}) if self.k_sem is None else self.k_sem(x)
            q = _scaled(q, None if gate is None else 2 * gate)
            if self.semantic_rope is None:
                yield q, q, k
            else:
                mask = context.attention_mask
                places = Places(mask.positions, mask.segment_ids, context.order)
                rotation = self.semantic_rope.rotation(places, _size(self.q_sem))
                yield q, rotation(q), rotation(k)
        if self.q_geo is not None:
            assert self.k_geo is not None
            q, k = _scaled(self.q_geo(x), None if gate is None else 2 - 2 * gate), self.k_geo(x)
            yield q, *(self._rotated(q, k, context.rotation) if context.rotation is not None else (q, k))

    def _rotated(self, q: NamedArray, k: NamedArray, rotation: Rotation) -> tuple[NamedArray, NamedArray]:
        """Rotates each pair of features by the frequency that `pairs` says."""
        assert self.pairs is not None
        by_head = rotation.of_pairs(self.pairs)
        KeyHeads, _ = self.pairs.axes
        return by_head(_grouped(q, KeyHeads)).flatten_axes((KeyHeads.name, QUERY_GROUP), HEADS), by_head(k)


def first_pairs(KeyHeads: Axis, num_pairs: int, num_frequencies: int) -> NamedArray:
    """`DecoupledAttention.pairs` for features that have all frequencies, in their order. Further pairs have them again."""
    Pairs, numbers = Axis(ROTARY_PAIRS, num_pairs), np.arange(num_pairs, dtype=np.int32) % num_frequencies
    return NamedArray(jnp.asarray(np.tile(numbers, (KeyHeads.size, 1))), (KeyHeads, Pairs))


def _grouped(q: NamedArray, KeyHeads: Axis) -> NamedArray:
    """Queries with the axis of the keys that they meet, and `query_group` for those of a key, instead of `heads`."""
    return q.unflatten_axis(HEADS, (KeyHeads, Axis(QUERY_GROUP, q.axis_size(HEADS) // KeyHeads.size)))


def _for_each_value(k: NamedArray, KVHeads: Axis) -> NamedArray:
    """Keys with the axis `kv_heads`, as kernels need them: a key that value heads share, for each of them."""
    if not k.has_axis(KEY_HEADS):
        return k
    KeyHeads = k.resolve_axis(KEY_HEADS)
    k = k.rearrange((..., KEY_HEADS, HEAD_SIZE))
    repeated = jnp.repeat(k.array, KVHeads.size // KeyHeads.size, axis=-2)
    return hax.auto_sharded(NamedArray(repeated, (*k.axes[:-2], KVHeads, k.axes[-1])))


def _size(layer: Linear | None) -> int:
    return 0 if layer is None else next(axis.size for axis in axes_of(layer.Out) if axis.name == HEAD_SIZE)


def _scaled(q: NamedArray, factor: NamedArray | None) -> NamedArray:
    """Queries times factor / sqrt(features), computed in float32."""
    scaled = q.astype(jnp.float32) / math.sqrt(q.axis_size(HEAD_SIZE))
    return (scaled if factor is None else scaled * factor).rearrange(q.axes).astype(q.dtype)
