"""Attention of Gemma 4: values have a norm, scores have no scale, and keys may be the values too, or an earlier layer's."""

import math
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import HEAD_SIZE, HEADS, KV_HEADS, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.models.attention.api import AttentionSpec, as_keys, attention
from jaxlm.models.attention.choose import AttentionTask
from jaxlm.models.attention.sharding import AttentionSharding
from jaxlm.models.flops import MixerWork
from jaxlm.models.inference.cached_attention import cached_attention
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.attention import Attention
from jaxlm.models.mixers.base import ForCache, LayerContext, NoCache
from jaxlm.models.mixers.key_values import KeyValue, KeyValueCache
from jaxlm.models.norms import RMSNorm, UnweightedRMSNorm
from jaxlm.models.remat import KEY, QUERY, VALUE, checkpoint_name


class NormedValueAttention(Attention):
    """Attention with norms of each head's queries, keys and values, in place of a scale of the scores.

    Source: Gemma 4 in transformers.

    Attributes:
        q_proj: {heads, head_size, embed}.
        k_proj: {kv_heads, head_size, embed}.
        v_proj: {kv_heads, head_size, embed}. None takes the projected keys, before their norm and rotation, as values.
        o_proj: {embed, heads, head_size}.
        v_norm: has no weight.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear | None
    o_proj: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    v_norm: UnweightedRMSNorm

    def task(
        self, platform: str, capability: tuple[int, int] | None, dtype: jnp.dtype, seq_len: int, window: int | None
    ) -> AttentionTask:
        query, key = ({axis.name: axis.size for axis in axes_of(layer.Out)} for layer in (self.q_proj, self.k_proj))
        group = query[HEADS] // key[KV_HEADS]
        return AttentionTask(
            platform, dtype, seq_len, query[HEAD_SIZE], group=group, window=window, capability=capability
        )

    def __call__(
        self, x: NamedArray, context: LayerContext, cache: Any, *, key: jax.Array | None = None
    ) -> tuple[NamedArray, ForCache]:
        q, k = self.q_proj(x), self.k_proj(x)
        v = self.v_norm(k if self.v_proj is None else self.v_proj(x))
        q, k = self.q_norm(q), self.k_norm(k)
        if context.rotation is not None:
            q, k = context.rotation(q), context.rotation(k)
        q, k, v = checkpoint_name(q, QUERY), checkpoint_name(k, KEY), checkpoint_name(v, VALUE)
        new: ForCache = KeyValue(k, v)
        if cache is not None and context.start is not None:
            new = cache = cache.extended(new, context.start)
        out = _attended(q, KeyValue(k, v), context, cache)
        return self.o_proj(hax.auto_sharded(out.astype(x.dtype))), new

    def init_cache(self, Batch: Axis, capacity: int, dtype: Any) -> KeyValueCache:
        return KeyValueCache.empty(Batch, capacity, self.k_proj.Out, self.k_proj.Out, dtype)

    def work(self, window: int | None) -> MixerWork:
        return MixerWork(math.prod(axis.size for axis in axes_of(self.q_proj.Out)), window)


class TakenKeyAttention(Attention):
    """`NormedValueAttention` to the keys and values of an earlier layer.

    Source: Gemma 4 in transformers (`num_kv_shared_layers`).

    Attributes:
        q_proj: {heads, head_size, embed}.
        o_proj: {embed, heads, head_size}.
        KVHeads: the heads of those keys and values.
    """

    q_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm
    KVHeads: Axis = eqx.field(static=True)

    def task(
        self, platform: str, capability: tuple[int, int] | None, dtype: jnp.dtype, seq_len: int, window: int | None
    ) -> AttentionTask:
        query = {axis.name: axis.size for axis in axes_of(self.q_proj.Out)}
        group = query[HEADS] // self.KVHeads.size
        return AttentionTask(
            platform, dtype, seq_len, query[HEAD_SIZE], group=group, window=window, capability=capability
        )

    def __call__(
        self, x: NamedArray, context: LayerContext, cache: Any, *, key: jax.Array | None = None
    ) -> tuple[NamedArray, ForCache]:
        if context.taken is None:
            raise ConfigError(
                "a layer of this model reads the keys and values of an earlier one, so that it cannot run without that."
                " Run all layers of the model, one after the other"
            )
        q = self.q_norm(self.q_proj(x))
        q = checkpoint_name(q if context.rotation is None else context.rotation(q), QUERY)
        out = _attended(q, context.taken.new, context, context.taken.cache)
        return self.o_proj(hax.auto_sharded(out.astype(x.dtype))), cache

    def init_cache(self, Batch: Axis, capacity: int, dtype: Any) -> NoCache:
        return NoCache.empty(Batch, capacity)

    def work(self, window: int | None) -> MixerWork:
        return MixerWork(math.prod(axis.size for axis in axes_of(self.q_proj.Out)), window)


def _attended(q: NamedArray, new: KeyValue, context: LayerContext, cache: KeyValueCache | None) -> NamedArray:
    """What the queries of new tokens attend to, {batch, position, heads, head_size}, with scores that have no scale."""
    spec = AttentionSpec(
        context.attention_mask,
        scale=1.0,
        window=context.window,
        backend=context.attn_backend,
        sharding=AttentionSharding.of(q, new.keys),
    )
    if cache is None:
        return attention(q, as_keys(new.keys), as_keys(new.values), spec)
    return cached_attention(q, new.keys, new.values, cache.keys, cache.values, spec)
