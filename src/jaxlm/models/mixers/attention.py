"""Attention of tokens to earlier ones, or to all."""

import abc
import math
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import HEAD_SIZE, HEADS, KV_HEADS, axes_of
from jaxlm.core.parameters import VECTOR, DeclaresParameters, Parameter
from jaxlm.models.attention.api import AttentionSpec, as_keys, attention
from jaxlm.models.attention.backends.blockwise import UNMODIFIED_SCORES
from jaxlm.models.attention.choose import AttentionTask
from jaxlm.models.attention.null_slot import NullSlot
from jaxlm.models.attention.scores import ScoreRule
from jaxlm.models.attention.sharding import AttentionSharding
from jaxlm.models.flops import MixerWork
from jaxlm.models.inference.cached_attention import cached_attention
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.base import ForCache, LayerContext, Mixer
from jaxlm.models.mixers.key_values import KeyValue, KeyValueCache
from jaxlm.models.norms import HeadwiseLayerNorm, RMSNorm, UnweightedRMSNorm
from jaxlm.models.remat import KEY, QUERY, VALUE, checkpoint_name


class Attention(Mixer):
    """A mixer whose tokens attend to each other, with a backend to choose."""

    @abc.abstractmethod
    def task(
        self, platform: str, capability: tuple[int, int] | None, dtype: jnp.dtype, seq_len: int, window: int | None
    ) -> AttentionTask:
        """Describes what the backend must support in training, with inputs of `dtype`."""

    @property
    def takes_order(self) -> bool:
        return True


def other_mixer(model: Any) -> str | None:
    """Returns the class name of the first mixer that is not attention; None if there is none."""
    return next((type(one).__name__ for one in tree.modules(model, Mixer) if not isinstance(one, Attention)), None)


class SelfAttention(Attention, DeclaresParameters):
    """Multi-head self-attention.

    Attributes:
        q_proj: {heads, head_size, embed}.
        k_proj, v_proj: {kv_heads, head_size, embed}.
        o_proj: {embed, heads, head_size}.
        q_norm, k_norm: norms of queries and keys, over each head or over all heads jointly.
        gate_proj: {heads, head_size, embed}. The sigmoid of its output is a factor of what each head has attended to (Qiu et
            al. 2025, arXiv:2505.06708); None for none.
        sinks: {heads}, a score of each head beside those of the keys, without a value (`NullSlot`); None for none.
        norms_follow_rotation: these norms come after the rotary embedding instead of before it.
        clip_qkv: queries, keys and values are clipped to [-clip_qkv, clip_qkv] before the rotation, and after norms that
            come before it; None does not clip.
        scale: factor of the scores; None means 1 / sqrt(head_size).
        rule: modifies the scaled scores before the softmax.
        causal: tokens attend to no later tokens.
        upcast: compute the attention matrix products in float32.
        dropout: dropout probability of the attention weights.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm | UnweightedRMSNorm | HeadwiseLayerNorm | None = None
    k_norm: RMSNorm | UnweightedRMSNorm | HeadwiseLayerNorm | None = None
    gate_proj: Linear | None = None
    sinks: NamedArray | None = None
    norms_follow_rotation: bool = eqx.field(static=True, default=False)
    clip_qkv: float | None = eqx.field(static=True, default=None)
    scale: float | None = eqx.field(static=True, default=None)
    rule: ScoreRule = eqx.field(static=True, default=UNMODIFIED_SCORES)
    causal: bool = eqx.field(static=True, default=True)
    upcast: bool = eqx.field(static=True, default=False)
    dropout: float = eqx.field(static=True, default=0.0)

    def task(
        self, platform: str, capability: tuple[int, int] | None, dtype: jnp.dtype, seq_len: int, window: int | None
    ) -> AttentionTask:
        # Of the axes, not of the weights: an adapted layer computes its weight.
        query, key = ({axis.name: axis.size for axis in axes_of(layer.Out)} for layer in (self.q_proj, self.k_proj))
        return AttentionTask(
            platform,
            jnp.dtype(jnp.float32) if self.upcast else dtype,
            seq_len,
            head_size=query[HEAD_SIZE],
            group=query[HEADS] // key[KV_HEADS],
            window=window,
            capability=capability,
            causal=self.causal,
            dropout=self.dropout,
            rule=self.rule,
            sink=self.sinks is not None,
        )

    def __call__(
        self,
        x: NamedArray,
        context: LayerContext,
        cache: Any,
        *,
        scale: float | jax.Array | None = None,
        value: NamedArray | None = None,
        key: jax.Array | None = None,
    ) -> tuple[NamedArray, ForCache]:
        """As `Mixer`.

        Args:
            scale: overrides the field, for layers with different scales.
            value: added to the values, {batch, position, kv_heads, head_size}.
        """
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if not self.norms_follow_rotation:
            q, k = self._normalized(q, k)
        if self.clip_qkv is not None:
            q, k, v = (hax.clip(a, -self.clip_qkv, self.clip_qkv) for a in (q, k, v))
        v = v if value is None else v + value.rearrange(v.axes)
        if context.rotation is not None:
            q, k = context.rotation(q), context.rotation(k)
        if self.norms_follow_rotation:
            q, k = self._normalized(q, k)
        if context.query_scale is not None:
            q = (q * context.query_scale.astype(q.dtype)).rearrange(q.axes)
        q, k, v = checkpoint_name(q, QUERY), checkpoint_name(k, KEY), checkpoint_name(v, VALUE)
        new: ForCache = KeyValue(k, v)
        if cache is not None and context.start is not None:
            new = cache = cache.extended(new, context.start)
        if self.upcast:
            q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
        spec = AttentionSpec(
            context.attention_mask,
            scale=self.scale if scale is None else scale,
            null_slot=None if self.sinks is None else NullSlot(self.sinks.astype(jnp.float32)),
            window=context.window,
            causal=self.causal,
            rule=self.rule,
            dropout=self.dropout,
            backend=context.attn_backend,
            sharding=AttentionSharding.of(q, k),
        )
        if cache is None:
            out = attention(q, as_keys(k), as_keys(v), spec, key=key)
        else:
            out = cached_attention(q, k, v, cache.keys, cache.values, spec)
        out = out.astype(x.dtype)
        if self.gate_proj is not None:
            out = (out * hax.nn.sigmoid(self.gate_proj(x))).rearrange(out.axes)
        return self.o_proj(hax.auto_sharded(out)), new

    def init_cache(self, Batch: Axis, capacity: int, dtype: Any) -> KeyValueCache:
        return KeyValueCache.empty(Batch, capacity, self.k_proj.Out, self.v_proj.Out, dtype)

    def work(self, window: int | None) -> MixerWork:
        return MixerWork(math.prod(axis.size for axis in axes_of(self.q_proj.Out)), window)

    def parameters(self) -> dict[str, Parameter]:
        return {"sinks": VECTOR}

    def _normalized(self, q: NamedArray, k: NamedArray) -> tuple[NamedArray, NamedArray]:
        return q if self.q_norm is None else self.q_norm(q), k if self.k_norm is None else self.k_norm(k)
