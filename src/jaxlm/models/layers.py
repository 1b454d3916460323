"""The parts that transformer families share: norms, linear maps, feed-forward networks, self-attention.

Every part takes and returns named arrays and says its parameters' axes in its `init`. Parameters are float32 at first;
computation happens in whatever dtype they arrive in, except where float32 is said.
"""

import abc
import itertools
import zlib
from typing import TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import HEAD_SIZE, HEADS, KV_HEADS
from jaxlm.models.activations import activated, gated
from jaxlm.models.attention.api import AttentionMask, as_keys, attention
from jaxlm.models.attention.backends.blockwise import UNMODIFIED_SCORES
from jaxlm.models.attention.choose import AUTO, AttentionTask
from jaxlm.models.attention.scores import ScoreRule
from jaxlm.models.base import KVArray
from jaxlm.models.inference.cached_attention import cached_attention
from jaxlm.models.inference.kv_cache import kv_array_with
from jaxlm.models.linear import Linear
from jaxlm.models.norms import RMSNorm
from jaxlm.models.remat import KEY, MLP, QUERY, VALUE, checkpoint_name
from jaxlm.models.rope import Rotation


def embedding(Vocab: Axis, Embed: Axis, *, std: float, key: jax.Array) -> hnn.Embedding:
    """A look-up table with N(0, std) entries."""
    return hnn.Embedding(hax.random.normal(key, (Vocab, Embed)) * std, Vocab, Embed)


def dropout(x: NamedArray, probability: float, key: jax.Array | None) -> NamedArray:
    """Zeroes entries with `probability` and scales the others up; without a key, the identity."""
    return hnn.dropout(x, probability, inference=key is None, key=key)


class Mlp(eqx.Module):
    """Embed to mlp, activation, mlp to embed (Vaswani et al. 2017, equation 2)."""

    up_proj: Linear
    down_proj: Linear
    activation: str = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        up = checkpoint_name(self.up_proj(x), MLP)
        return self.down_proj(NamedArray(activated(self.activation, up.array), up.axes))


class GatedMlp(eqx.Module):
    """The activation of one projection times another (Shazeer 2020, arXiv:2002.05202, equation 6: SwiGLU with silu)."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    activation: str = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        gate, up = checkpoint_name(self.gate_proj(x), MLP), checkpoint_name(self.up_proj(x), MLP)
        out = gated(self.activation, gate.array, up.rearrange(gate.axes).array)
        return self.down_proj(NamedArray(out, gate.axes))


class KeyValue(eqx.Module):
    """One layer's keys and values of new tokens, {batch, position, kv_heads, head_size}."""

    keys: NamedArray
    values: NamedArray


class LayerCache(eqx.Module):
    """One layer's keys and values in the cache.

    Attributes:
        at: the slot from which on the layer writes its new ones itself, before it reads: what is read after it is written
            is written in place. None where all layers' are written at once, after the last.
    """

    keys: KVArray
    values: KVArray
    at: jax.Array | None = None

    def with_new(self, new: KeyValue) -> "LayerCache":
        """With the new ones in slots that nobody sees yet."""
        assert self.at is not None
        return LayerCache(
            kv_array_with(self.keys, new.keys, self.at), kv_array_with(self.values, new.values, self.at), self.at
        )


ForCache = KeyValue | LayerCache
"""What a layer hands back for the cache: what is to be written, or what it has written."""


class LayerContext(eqx.Module):
    """What the layers of one forward pass, or those of one kind, share.

    Attributes:
        visibility: who attends to whom.
        rotation: of queries and keys, for the families that rotate.
        window: how many tokens a token sees, itself included; None means all before it.
        attn_backend: what attention runs on.
    """

    attention_mask: AttentionMask
    rotation: Rotation | None = None
    window: int | None = eqx.field(static=True, default=None)
    attn_backend: str = eqx.field(static=True, default=AUTO)


class SelfAttention(eqx.Module):
    """Multi-head attention of a sequence to itself, and to what the cache holds.

    Attributes:
        q_proj: {heads, head_size, embed}.
        k_proj, v_proj: {kv_heads, head_size, embed}.
        o_proj: {embed, heads, head_size}.
        q_norm, k_norm: of queries and keys, before they are rotated: over each head, or over all heads at once.
        scale: what scores are multiplied by; None means 1 / sqrt(head_size).
        rule: what becomes of scores before the softmax.
        upcast: attend in float32 from the scores to the weighted values.
        dropout: of attention weights.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    scale: float | None = eqx.field(static=True, default=None)
    rule: ScoreRule = eqx.field(static=True, default=UNMODIFIED_SCORES)
    upcast: bool = eqx.field(static=True, default=False)
    dropout: float = eqx.field(static=True, default=0.0)

    def task(
        self,
        platform: str,
        capability: tuple[int, int] | None,
        dtype: jnp.dtype,
        seq_len: int,
        window: int | None,
    ) -> AttentionTask:
        """What it asks of a backend in training, where its inputs are of `dtype`."""
        heads, kv_heads = self.q_proj.weight.axis_size(HEADS), self.k_proj.weight.axis_size(KV_HEADS)
        return AttentionTask(
            platform,
            jnp.dtype(jnp.float32) if self.upcast else dtype,
            seq_len,
            head_size=self.q_proj.weight.axis_size(HEAD_SIZE),
            group=heads // kv_heads,
            window=window,
            capability=capability,
            dropout=self.dropout,
            rule=self.rule,
        )

    def __call__(
        self,
        x: NamedArray,
        context: LayerContext,
        past: LayerCache | None,
        *,
        scale: float | jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> tuple[NamedArray, ForCache]:
        """{batch, position, embed} to the same, and this call's own keys and values, or the past with them in it.

        Args:
            scale: instead of the module's own, for layers that differ in it.
        """
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k = q if self.q_norm is None else self.q_norm(q), k if self.k_norm is None else self.k_norm(k)
        if context.rotation is not None:
            q, k = context.rotation(q), context.rotation(k)
        q, k, v = checkpoint_name(q, QUERY), checkpoint_name(k, KEY), checkpoint_name(v, VALUE)
        new: ForCache = KeyValue(k, v)
        if past is not None and past.at is not None:
            new = past = past.with_new(new)
        if self.upcast:
            q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
        scale, seen = self.scale if scale is None else scale, context.attention_mask
        if past is None:
            options = {"dropout": self.dropout, "key": key, "backend": context.attn_backend}
            out = attention(
                q, as_keys(k), as_keys(v), seen, scale=scale, window=context.window, rule=self.rule, **options
            )
        else:
            out = cached_attention(
                q, k, v, past.keys, past.values, seen, scale=scale, window=context.window, rule=self.rule
            )
        return self.o_proj(hax.auto_sharded(out.astype(x.dtype))), new


T = TypeVar("T")
# Blocks split their key for what they draw themselves; folded with this, it gives other keys than those.
_DROPOUT_SALT = zlib.crc32(b"layers that drop")


class DropoutLayer(eqx.Module):
    """A layer that drops nothing until it has a key.

    Whoever calls such a layer knows nothing of it: the body of a model gives each its own key before it runs a block, and
    none where nothing is learned. So a layer that drops something can stand wherever one that does not stood.
    """

    @abc.abstractmethod
    def with_key(self, key: jax.Array) -> "DropoutLayer":
        """The same layer, drawing by this key."""


def with_dropout_keys(block: T, key: jax.Array | None) -> T:
    """The block with a key of its own in every layer that drops something; without a key, the block as it is."""
    if key is None or not tree.modules(block, DropoutLayer):
        return block
    apart, number = jax.random.fold_in(key, _DROPOUT_SALT), itertools.count()
    return tree.map_modules(
        block, DropoutLayer, ".*", lambda layer: layer.with_key(jax.random.fold_in(apart, next(number)))
    )
