"""Multi-head latent attention: keys and values of all heads are projected from one vector per token, the latent.

In training, keys and values are computed. While text is generated, only the latent and one rotated key are kept of a token:
the projection to keys is applied to queries instead, and that to values to what has been attended to.

Source: DeepSeek-AI 2024, DeepSeek-V2 (arXiv:2405.04434), section 2.1 and appendix C.
"""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import (
    BATCH,
    CACHE_ROW,
    HEAD_SIZE,
    HEADS,
    KEY_POSITION,
    KV_HEADS,
    LATENT,
    LATENT_KEY,
    POSITION,
    axes_of,
)
from jaxlm.core.products.fp8 import multiplies_in_fp8
from jaxlm.core.products.matmul import dot
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.core.tree import is_named
from jaxlm.models.attention.api import AttentionSpec, as_keys, attention
from jaxlm.models.attention.choose import AttentionTask
from jaxlm.models.attention.context.keys import LatentKeys
from jaxlm.models.attention.sharding import AttentionSharding
from jaxlm.models.flops import MixerWork
from jaxlm.models.inference.cached_attention import cached_latent_attention
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.attention import Attention
from jaxlm.models.mixers.base import LayerCache, LayerContext
from jaxlm.models.mixers.key_values import KVArray, by_cache_row, write_kv_array
from jaxlm.models.norms import RMSNorm
from jaxlm.models.remat import KEY, QUERY, VALUE, checkpoint_name


class Latents(eqx.Module):
    """What one layer keeps of new tokens.

    Attributes:
        latents: normalized, {batch, position, head_size}.
        keys: rotated, {batch, position, head_size}.
    """

    latents: NamedArray
    keys: NamedArray


class LatentCache(LayerCache):
    """Latents and rotated keys of a layer, {batch, key_position, head_size}, with a scale for each if they are int8."""

    latents: KVArray
    keys: KVArray

    def extended(self, new: Latents, start: jax.Array | None) -> "LatentCache":
        return LatentCache(write_kv_array(self.latents, new.latents, start), write_kv_array(self.keys, new.keys, start))

    def flattened(self) -> "LatentCache":
        return jax.tree.map(by_cache_row, self, is_leaf=is_named)

    def unflattened(self, Batch: Axis) -> "LatentCache":
        def with_batch(leaf: NamedArray) -> NamedArray:
            if leaf.has_axis(CACHE_ROW):
                return leaf.rename({CACHE_ROW: Batch.name})
            names = [axis.name for axis in leaf.axes]
            return leaf.broadcast_axis(Batch).rearrange(
                (*names[: (at := names.index(KEY_POSITION))], Batch.name, *names[at:])
            )

        return jax.tree.map(with_batch, self, is_leaf=is_named)


class LatentAttention(Attention):
    """Multi-head latent attention.

    The features of a query or key without a position come before the rotated ones, which all heads share in keys. Modules
    have the names that they have in files, as adapters of other programs target them.

    Attributes:
        q_proj: {heads, head_size, embed}; None if queries have a latent of their own.
        q_a_proj: {query_latent, embed}, and `q_a_norm` behind it.
        q_b_proj: {heads, head_size, query_latent}.
        kv_a_proj_with_mqa: {latent_key, embed}, to the latent and the rotated key.
        kv_a_norm: norm of the latent.
        kv_b_proj: {heads, head_size, latent}, to a key without a position and to a value for each head.
        o_proj: {embed, heads, head_size}, with the features of values.
        scale: factor of the scores, besides `LayerContext.score_factor`.
    """

    q_proj: Linear | None
    q_a_proj: Linear | None
    q_a_norm: RMSNorm | None
    q_b_proj: Linear | None
    kv_a_proj_with_mqa: Linear
    kv_a_norm: RMSNorm
    kv_b_proj: Linear
    o_proj: Linear
    scale: float = eqx.field(static=True)

    def task(
        self, platform: str, capability: tuple[int, int] | None, dtype: jnp.dtype, seq_len: int, window: int | None
    ) -> AttentionTask:
        sizes = self._sizes
        return AttentionTask(
            platform,
            dtype,
            seq_len,
            head_size=sizes.plain + sizes.rotated,
            value_size=sizes.value,
            window=window,
            capability=capability,
        )

    def __call__(
        self, x: NamedArray, context: LayerContext, cache: LatentCache | None, *, key: jax.Array | None = None
    ) -> tuple[NamedArray, Any]:
        sizes = self._sizes
        q_plain, q_rotated = _split(self._queries(x), sizes.plain, sizes.rotated)
        latents, keys = _split(self.kv_a_proj_with_mqa(x).rename({LATENT_KEY: HEAD_SIZE}), sizes.latent, sizes.rotated)
        latents = self.kv_a_norm(latents.rename({HEAD_SIZE: LATENT}))
        if context.rotation is not None:
            q_rotated, keys = context.rotation(q_rotated), context.rotation(keys)
        if context.query_scale is not None:
            scaled = ((q * context.query_scale.astype(q.dtype)).rearrange(q.axes) for q in (q_plain, q_rotated))
            q_plain, q_rotated = scaled
        new: Any = Latents(latents.rename({LATENT: HEAD_SIZE}), keys)
        if cache is not None and context.start is not None:
            new = cache = cache.extended(new, context.start)
        spec = AttentionSpec(
            context.attention_mask,
            scale=self.scale * context.score_factor,
            window=context.window,
            backend=context.attn_backend,
        )
        if cache is None:
            out = self._attend(hax.concatenate(HEAD_SIZE, [q_plain, q_rotated]), latents, keys, spec)
        else:
            out = self._attend_cached(q_plain, q_rotated, latents, keys, cache, spec)
        return self.o_proj(hax.auto_sharded(out.astype(x.dtype))), new

    def init_cache(self, Batch: Axis, capacity: int, dtype: Any) -> LatentCache:
        sizes = self._sizes
        slots = (KVArray.empty(Batch, capacity, Axis(HEAD_SIZE, size), dtype) for size in (sizes.latent, sizes.rotated))
        return LatentCache(*slots)

    def work(self, window: int | None) -> MixerWork:
        sizes = self._sizes
        return MixerWork(sizes.heads * (sizes.plain + sizes.rotated + sizes.value) // 2, window)

    def _queries(self, x: NamedArray) -> NamedArray:
        """{batch, position, heads, head_size}."""
        if self.q_proj is not None:
            return self.q_proj(x)
        down, norm, up = self.q_a_proj, self.q_a_norm, self.q_b_proj
        assert down is not None
        assert norm is not None
        assert up is not None
        return up(norm(down(x)))

    def _attend(self, q: NamedArray, latents: NamedArray, keys: NamedArray, spec: AttentionSpec) -> NamedArray:
        """Attention to keys and values of each head, {batch, position, heads, head_size}."""
        sizes = self._sizes
        k_plain, v = _split(self.kv_b_proj(latents), sizes.plain, sizes.value)
        rotated = keys.broadcast_axis(k_plain.resolve_axis(HEADS)).rearrange(
            (*(a.name for a in k_plain.axes[:-1]), HEAD_SIZE)
        )
        k, v = (a.rename({HEADS: KV_HEADS}) for a in (hax.concatenate(HEAD_SIZE, [k_plain, rotated]), v))
        q, k, v = checkpoint_name(q, QUERY), checkpoint_name(k, KEY), checkpoint_name(v, VALUE)
        spec = dataclasses.replace(spec, sharding=AttentionSharding.of(q, k))
        source = self._latent_keys(latents, keys) if spec.sharding.context.axes else None
        return attention(q, as_keys(k), as_keys(v), spec, latents=source)

    def _latent_keys(self, latents: NamedArray, keys: NamedArray) -> LatentKeys | None:
        """What keys and values are computed from, if it takes one product in the dtype of the weight or of the latents."""
        layer = self.kv_b_proj
        if not isinstance(layer, Linear) or (layer.fp8 is not None and multiplies_in_fp8()):
            return None
        weight = layer.weight
        weight = weight.floats(latents.dtype) if isinstance(weight, StoredWeight) else weight
        latents, keys = (checkpoint_name(a, name) for a, name in ((latents, KEY), (keys, VALUE)))
        return LatentKeys(
            latents.rearrange((BATCH, POSITION, LATENT)).array,
            keys.rearrange((BATCH, POSITION, HEAD_SIZE)).array,
            weight.rearrange((HEADS, HEAD_SIZE, LATENT)).array[:, None],
        )

    def _attend_cached(
        self,
        q_plain: NamedArray,
        q_rotated: NamedArray,
        latents: NamedArray,
        keys: NamedArray,
        cache: LatentCache,
        spec: AttentionSpec,
    ) -> NamedArray:
        """The same from a cache, whose keys and values are not computed."""
        sizes, weight = self._sizes, self.kv_b_proj.weight
        weight = weight.floats(latents.dtype) if isinstance(weight, StoredWeight) else weight
        to_key, to_value = _split(weight.rearrange((HEADS, LATENT, HEAD_SIZE)), sizes.plain, sizes.value)
        q_latent = dot(q_plain, to_key, HEAD_SIZE).astype(q_plain.dtype).rename({LATENT: HEAD_SIZE})
        new = latents.rename({LATENT: HEAD_SIZE}), keys
        out = cached_latent_attention((q_latent, q_rotated), new, (cache.latents, cache.keys), spec)
        return dot(out.rename({HEAD_SIZE: LATENT}), to_value, LATENT)

    @property
    def _sizes(self) -> "_Sizes":
        # Of the axes, not of the weights: an adapted layer computes its weight.
        heads, value = (axis.size for axis in axes_of(self.o_proj.In))
        (latent,), (both,) = axes_of(self.kv_b_proj.In), axes_of(self.kv_a_proj_with_mqa.Out)
        _, out = axes_of(self.kv_b_proj.Out)
        return _Sizes(heads, out.size - value, both.size - latent.size, value, latent.size)


class _Sizes(NamedTuple):
    """The number of heads, and features: of a key without a position, of a rotated one, of a value, of the latent."""

    heads: int
    plain: int
    rotated: int
    value: int
    latent: int


def _split(x: NamedArray, first: int, second: int) -> tuple[NamedArray, NamedArray]:
    """The first and the other features of {..., head_size}."""
    parts = x.split(HEAD_SIZE, [Axis(HEAD_SIZE, first), Axis(HEAD_SIZE, second)])
    return parts[0], parts[1]
