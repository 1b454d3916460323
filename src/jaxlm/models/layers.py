"""Layers that transformer families share: embedding, dropout, MLPs, self-attention.

Layers take and return named arrays. Parameters are initialized in float32; layers compute in the dtype of their
arguments unless they say otherwise.
"""

import abc
import functools
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
from jaxlm.core.axes import BATCH, EMBED, HEAD_SIZE, HEADS, KV_HEADS, POSITION, axes_of
from jaxlm.core.values.text_order import in_row_order
from jaxlm.models.activations import activated, gated
from jaxlm.models.attention.api import AttentionMask, AttentionSpec, as_keys, attention
from jaxlm.models.attention.backends.blockwise import UNMODIFIED_SCORES
from jaxlm.models.attention.choose import AUTO, AttentionTask
from jaxlm.models.attention.scores import ScoreRule
from jaxlm.models.attention.sharding import AttentionSharding
from jaxlm.models.base import Inputs, KVArray
from jaxlm.models.inference.cached_attention import cached_attention
from jaxlm.models.inference.kv_cache import write_kv_array
from jaxlm.models.linear import Linear
from jaxlm.models.norms import RMSNorm, UnweightedRMSNorm
from jaxlm.models.remat import KEY, MLP, QUERY, VALUE, checkpoint_name
from jaxlm.models.rope import Rotation


def embedding(Vocab: Axis, Embed: Axis, *, std: float, key: jax.Array) -> hnn.Embedding:
    """Initializes an embedding table with N(0, std) entries."""
    return hnn.Embedding(hax.random.normal(key, (Vocab, Embed)) * std, Vocab, Embed)


_GENERATOR = "threefry2x32"  # whose keys are two words


def token_embeddings(table: hnn.Embedding, inputs: Inputs) -> NamedArray:
    """The embeddings of the input tokens, {batch, position, embed}, with the inputs' noise if they have any.

    Source: Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning" (arXiv:2310.05914), algorithm 1:
    alpha / sqrt(L d) times a number that is uniform in [-1, 1), for d features and the L tokens of an example. An example
    is a document of the row, so the size of the noise does not depend on what it is packed with.
    """
    x = table(inputs.tokens)
    if inputs.noise is None:
        return x
    ids_BS = inputs.segment_ids.rearrange((BATCH, POSITION)).array
    Batch, Pos, Embed = (x.resolve_axis(name) for name in (BATCH, POSITION, EMBED))
    # Another generator may give other numbers under `vmap`.
    keys_B = jax.random.wrap_key_data(inputs.noise.keys.rearrange((BATCH, ...)).array, impl=_GENERATOR)
    uniform = functools.partial(jax.random.uniform, shape=(Pos.size, Embed.size), minval=-1.0, maxval=1.0)
    lengths_BS = jax.vmap(lambda ids: jnp.bincount(ids, length=Pos.size + 1)[ids])(ids_BS)
    size_BS = jnp.where(ids_BS == 0, 0.0, inputs.noise.alpha * jax.lax.rsqrt(jnp.float32(Embed.size) * lengths_BS))
    noise = in_row_order(NamedArray(jax.vmap(uniform)(keys_B), (Batch, Pos, Embed)), inputs.order)
    noise = NamedArray(noise.array * size_BS[..., None], noise.axes)
    return (x + noise).rearrange(x.axes).astype(x.dtype)


def dropout(x: NamedArray, probability: float, key: jax.Array | None) -> NamedArray:
    """Zeroes entries with `probability` and scales the others up. Without a key, returns x."""
    return hnn.dropout(x, probability, inference=key is None, key=key)


class Mlp(eqx.Module):
    """An MLP without a gate: embed to mlp, activation, mlp to embed (Vaswani et al. 2017, equation 2)."""

    up_proj: Linear
    down_proj: Linear
    activation: str = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        up = checkpoint_name(self.up_proj(x), MLP)
        return self.down_proj(NamedArray(activated(self.activation, up.array), up.axes))


class GatedMlp(eqx.Module):
    """A gated MLP (Shazeer 2020, arXiv:2002.05202, equation 6): SwiGLU if the activation is silu."""

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
    """The KV cache of one layer.

    Attributes:
        start: the slot from which the layer itself writes its new keys and values, before it reads the cache (XLA then
            updates in place). None if the caller writes those of all layers at once, after the last layer.
    """

    keys: KVArray
    values: KVArray
    start: jax.Array | None = None

    def write(self, new: KeyValue) -> "LayerCache":
        """Writes new keys and values to empty slots."""
        assert self.start is not None
        keys = write_kv_array(self.keys, new.keys, self.start)
        return LayerCache(keys, write_kv_array(self.values, new.values, self.start), self.start)


ForCache = KeyValue | LayerCache
"""What a layer returns for the cache: keys and values to write, or its updated cache."""


class LayerContext(eqx.Module):
    """Inputs that all layers of one kind share in one forward pass.

    Attributes:
        attention_mask: which tokens attend to which, apart from the window.
        rotation: rotary embedding of queries and keys; None for none.
        window: number of tokens that each token attends to, including itself; None means all previous tokens.
        attn_backend: backend of attention, or `auto`.
        order: as in `Inputs`.
    """

    attention_mask: AttentionMask
    rotation: Rotation | None = None
    window: int | None = eqx.field(static=True, default=None)
    attn_backend: str = eqx.field(static=True, default=AUTO)
    order: NamedArray | None = None


class Attention(eqx.Module):
    """Attention of the tokens of a row to each other, with an optional KV cache."""

    @abc.abstractmethod
    def task(
        self, platform: str, capability: tuple[int, int] | None, dtype: jnp.dtype, seq_len: int, window: int | None
    ) -> AttentionTask:
        """What the backend must support in training, with inputs of `dtype`."""

    @abc.abstractmethod
    def __call__(
        self,
        x: NamedArray,
        context: LayerContext,
        layer_cache: LayerCache | None,
        *,
        key: jax.Array | None = None,
    ) -> tuple[NamedArray, ForCache]:
        """Maps {batch, position, embed} to the same shape; also returns the new keys and values, or the updated cache."""


class SelfAttention(Attention):
    """Multi-head self-attention.

    Attributes:
        q_proj: {heads, head_size, embed}.
        k_proj, v_proj: {kv_heads, head_size, embed}.
        o_proj: {embed, heads, head_size}.
        q_norm, k_norm: norms of queries and keys, over each head or over all heads jointly.
        norms_follow_rotation: these norms come after the rotary embedding instead of before it.
        clip_qkv: queries, keys and values are clipped to [-clip_qkv, clip_qkv] before their norms; None does not clip.
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
    q_norm: RMSNorm | UnweightedRMSNorm | None = None
    k_norm: RMSNorm | UnweightedRMSNorm | None = None
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
        )

    def __call__(
        self,
        x: NamedArray,
        context: LayerContext,
        layer_cache: LayerCache | None,
        *,
        scale: float | jax.Array | None = None,
        value: NamedArray | None = None,
        key: jax.Array | None = None,
    ) -> tuple[NamedArray, ForCache]:
        """As `Attention`.

        Args:
            scale: overrides the field, for layers with different scales.
            value: added to the values, {batch, position, kv_heads, head_size}.
        """
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.clip_qkv is not None:
            q, k, v = (hax.clip(a, -self.clip_qkv, self.clip_qkv) for a in (q, k, v))
        v = v if value is None else v + value.rearrange(v.axes)
        if not self.norms_follow_rotation:
            q, k = self._normalized(q, k)
        if context.rotation is not None:
            q, k = context.rotation(q), context.rotation(k)
        if self.norms_follow_rotation:
            q, k = self._normalized(q, k)
        q, k, v = checkpoint_name(q, QUERY), checkpoint_name(k, KEY), checkpoint_name(v, VALUE)
        new: ForCache = KeyValue(k, v)
        if layer_cache is not None and layer_cache.start is not None:
            new = layer_cache = layer_cache.write(new)
        if self.upcast:
            q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
        spec = AttentionSpec(
            context.attention_mask,
            scale=self.scale if scale is None else scale,
            window=context.window,
            causal=self.causal,
            rule=self.rule,
            dropout=self.dropout,
            backend=context.attn_backend,
            sharding=AttentionSharding.of(q, k),
        )
        if layer_cache is None:
            out = attention(q, as_keys(k), as_keys(v), spec, key=key)
        else:
            out = cached_attention(q, k, v, layer_cache.keys, layer_cache.values, spec)
        return self.o_proj(hax.auto_sharded(out.astype(x.dtype))), new

    def _normalized(self, q: NamedArray, k: NamedArray) -> tuple[NamedArray, NamedArray]:
        return q if self.q_norm is None else self.q_norm(q), k if self.k_norm is None else self.k_norm(k)


T = TypeVar("T")
# Blocks split their key for their own dropout. Folding this in gives keys that differ from those.
_DROPOUT_SALT = zlib.crc32(b"layers that drop")


class DropoutLayer(eqx.Module):
    """A layer with dropout that is called without a key, so that it can replace a layer without dropout.

    The model's body gives each of them its own key before it runs a block. Without a key there is no dropout.
    """

    @abc.abstractmethod
    def with_key(self, key: jax.Array) -> "DropoutLayer":
        """The same layer with dropout by this key."""


def with_dropout_keys(block: T, key: jax.Array | None) -> T:
    """The block with a separate key in every `DropoutLayer`. Without a key, returns the block."""
    if key is None or not tree.modules(block, DropoutLayer):
        return block
    dropout_key, number = jax.random.fold_in(key, _DROPOUT_SALT), itertools.count()
    return tree.map_modules(
        block, DropoutLayer, ".*", lambda layer: layer.with_key(jax.random.fold_in(dropout_key, next(number)))
    )
