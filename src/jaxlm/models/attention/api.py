"""Softmax attention over packed documents: one function that dispatches to a backend.

Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1; grouped-query attention: Ainslie et al. 2023
(arXiv:2305.13245); sliding windows: Beltagy et al. 2020 (arXiv:2004.05150), section 3.1, causal.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import AxisSelector, NamedArray

from jaxlm.core.axes import BATCH, HEAD_SIZE, HEADS, KEY_POSITION, KV_HEADS, POSITION
from jaxlm.core.devices import cuda_capability
from jaxlm.core.sharding import current_device, current_platform
from jaxlm.core.tracing import trace_options
from jaxlm.models.attention.backends.blockwise import UNMODIFIED_SCORES, Reach, blockwise_attention
from jaxlm.models.attention.backends.cudnn import cudnn_attention
from jaxlm.models.attention.backends.reference import reference_attention
from jaxlm.models.attention.backends.splash import splash_attention
from jaxlm.models.attention.choose import AUTO, AttentionTask, choose_attention, kernel_head_size
from jaxlm.models.attention.context.cudnn_hops import CudnnHops
from jaxlm.models.attention.context.keys import LatentKeys
from jaxlm.models.attention.context.partial import InBlocks, PartialAttention
from jaxlm.models.attention.null_slot import NullSlot
from jaxlm.models.attention.scores import ScoreRule, alibi_slopes
from jaxlm.models.attention.sharding import AttentionSharding
from jaxlm.models.base import Inputs


def as_keys(x: NamedArray) -> NamedArray:
    """Renames {position} to {key_position}."""
    renames: dict[AxisSelector, AxisSelector] = {POSITION: KEY_POSITION}
    return x.rename(renames)


class AttentionMask(eqx.Module):
    """A mask over packed documents: a query attends to keys of its own segment, and unless the `AttentionSpec` says
    otherwise, only to those at the same or an earlier position. Segment 0 is padding: it neither attends nor is attended to.

    Attributes:
        positions, segment_ids: int32 {batch, position}, of the queries.
        key_positions, key_segment_ids: int32 {batch, key_position}.
        same_tokens: queries and keys are the same tokens.
        in_text_order: positions increase along the row, apart from the first of each document.
    """

    positions: NamedArray
    segment_ids: NamedArray
    key_positions: NamedArray
    key_segment_ids: NamedArray
    same_tokens: bool = eqx.field(static=True, default=False)
    in_text_order: bool = eqx.field(static=True, default=True)

    @staticmethod
    def of(inputs: Inputs) -> "AttentionMask":
        """The mask of inputs that attend to each other, without a cache."""
        keys = map(as_keys, (inputs.positions, inputs.segment_ids))
        in_text_order = inputs.order is None
        return AttentionMask(inputs.positions, inputs.segment_ids, *keys, same_tokens=True, in_text_order=in_text_order)


class AttentionSpec(eqx.Module):
    """Says how queries attend to keys and values, apart from these three.

    Attributes:
        mask: which queries attend to which keys, apart from the window.
        scale: factor of the scores; None means 1 / sqrt(head_size).
        window: number of tokens that a query attends to, including itself; None means all previous tokens.
        causal: a query attends to no later key. False extends mask and window to later ones.
        rule: modifies the scaled scores before the softmax: soft cap, ALiBi.
        dropout: dropout probability of the attention weights; ignored without a key.
        backend: a backend of `jaxlm.models.attention.choose`. Ignored (treated as `auto`) if queries and keys are not
            the same tokens, and for second derivatives.
        sharding: of queries, keys and values on the mesh. The default is a single device.
        null_slot: one more score, and maybe a value to attend to; None for none.
    """

    mask: AttentionMask
    scale: float | jax.Array | None = None
    null_slot: NullSlot | None = None
    window: int | None = eqx.field(static=True, default=None)
    causal: bool = eqx.field(static=True, default=True)
    rule: ScoreRule = eqx.field(static=True, default=UNMODIFIED_SCORES)
    dropout: float = eqx.field(static=True, default=0.0)
    backend: str = eqx.field(static=True, default=AUTO)
    sharding: AttentionSharding = eqx.field(static=True, default=AttentionSharding())

    def factor(self, head_size: int) -> float | jax.Array:
        """The factor of the scores."""
        return head_size**-0.5 if self.scale is None else self.scale

    def task(self, q: NamedArray, num_kv_heads: int, value_size: int) -> AttentionTask:
        """Describes what a backend must support for these queries, on the devices of the current layout."""
        return AttentionTask(
            current_platform(),
            q.dtype,
            q.axis_size(POSITION),
            head_size=q.axis_size(HEAD_SIZE),
            value_size=value_size,
            group=q.axis_size(HEADS) // num_kv_heads,
            window=self.window,
            capability=cuda_capability(current_device()),
            same_tokens=self.mask.same_tokens,
            causal=self.causal,
            dropout=self.dropout,
            rule=self.rule,
            null_slot=self.null_slot is not None and not self.null_slot.is_sink,
            sink=self.null_slot is not None and self.null_slot.is_sink,
            twice_differentiable=trace_options().twice_differentiable,
            context=self.sharding.context,
            in_text_order=self.mask.in_text_order,
        )


@jax.named_scope("attention")  # profile summaries match this name
def attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    spec: AttentionSpec,
    *,
    key: jax.Array | None = None,
    latents: LatentKeys | None = None,
) -> NamedArray:
    """Softmax attention. A query that attends to no key returns 0.

    Scores and softmax are float32. The weights are cast to the dtype of the values before the second product.

    Args:
        q: {batch, position, heads, head_size}. Query head h reads key/value head h // (heads / kv_heads).
        k, v: {batch, key_position, kv_heads, head_size}. The values may have another head size than queries and keys.
        key: for dropout; None means no dropout.
        latents: what keys and values were computed from. Devices that divide the tokens of a row exchange it instead of
            them, and then nothing reads `k` and `v`.

    Returns:
        {batch, position, heads, head_size} with the head size and in the dtype of `v`.
    """
    q = q.rearrange((BATCH, POSITION, HEADS, HEAD_SIZE))
    k, v = (a.rearrange((BATCH, KEY_POSITION, KV_HEADS, HEAD_SIZE)) for a in (k, v))
    num_heads, num_kv_heads = q.axis_size(HEADS), k.axis_size(KV_HEADS)
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    spec = spec if key is not None else dataclasses.replace(spec, dropout=0.0)
    factor = spec.factor(q.axis_size(HEAD_SIZE))
    q_BTKGH = q.array.reshape(*q.array.shape[:2], num_kv_heads, -1, q.axis_size(HEAD_SIZE))
    task = spec.task(q, num_kv_heads, v.axis_size(HEAD_SIZE))
    ignores_backend = task.twice_differentiable or not task.same_tokens
    choice = choose_attention(task, AUTO if ignores_backend else spec.backend)
    segments = spec.mask.segment_ids.rearrange((BATCH, POSITION)).array
    scale = jnp.asarray(factor, jnp.float32)
    sink = spec.null_slot.sink_KG(num_kv_heads) if task.sink and spec.null_slot is not None else None
    if choice.name in ("blockwise", "cudnn_rows") and task.needs_parts:
        out = _in_parts(choice.name, q_BTKGH, k.array, v.array, factor, spec, sink, latents)
    elif choice.name == "blockwise":
        options = {"window": spec.window, "rule": spec.rule, "causal": spec.causal}
        kernel = _with_sink(functools.partial(blockwise_attention, **options))
        # Other sharding than that of tokens is left to the partitioner.
        kernel = spec.sharding.shard_map(kernel, latents) if spec.sharding.context.heads else kernel
        out = kernel(q_BTKGH, k.array, v.array, segments, sink, scale)
    elif choice.name == "splash":
        kernel = _with_sink(functools.partial(splash_attention, window=spec.window, causal=spec.causal))
        run = spec.sharding.shard_map(_with_equal_sizes(kernel), latents)
        out = run(q_BTKGH, k.array, v.array, segments, sink, scale)
    elif choice.name in ("cudnn", "cudnn_rows"):
        q_BTKGH, constant = _with_constant_scale(q_BTKGH, factor)
        options = {"window": spec.window, "packed": choice.name == "cudnn", "causal": spec.causal}
        kernel = _with_sink(functools.partial(cudnn_attention, scale=constant, **options))
        out = spec.sharding.shard_map(_with_equal_sizes(kernel), latents)(q_BTKGH, k.array, v.array, segments, sink)
    else:
        mask_BTS, distance_BTS = mask_and_distance(spec)
        score_fn = functools.partial(spec.rule, distance_BTS=distance_BTS)
        arrays = (q_BTKGH, k.array, v.array, mask_BTS)
        out = reference_attention(*arrays, factor, spec.dropout, key, score_fn, spec.null_slot)
    return NamedArray(out.reshape(*q.array.shape[:-1], -1), (*q.axes[:-1], v.axes[-1]))


def _in_parts(
    backend: str,
    q_BTKGH,
    k_BTKH,
    v_BTKH,
    factor: float | jax.Array,
    spec: AttentionSpec,
    sink_KG: jax.Array | None,
    latents: LatentKeys | None,
) -> jax.Array:
    """Attention of rows whose tokens devices divide."""
    kernel: PartialAttention = InBlocks(Reach(spec.window, spec.causal), q_BTKGH.shape[1], spec.rule)
    if backend == "cudnn_rows":
        q_BTKGH, factor = _with_constant_scale(q_BTKGH, factor)
        kernel = CudnnHops(spec.sharding.context.ring, factor, kernel)
    heads = q_BTKGH.shape[2:4]
    alibi_max = spec.rule.alibi_max
    slopes = None if alibi_max is None else jnp.asarray(alibi_slopes(math.prod(heads), alibi_max).reshape(heads))
    positions, segments = (a.rearrange((BATCH, POSITION)).array for a in (spec.mask.positions, spec.mask.segment_ids))
    scale = jnp.asarray(factor, jnp.float32)
    arrays = (q_BTKGH, k_BTKH, v_BTKH, positions, segments, scale, slopes, sink_KG)
    return spec.sharding.divided(kernel, *arrays, latents)


def _with_sink(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A kernel whose argument after queries, keys, values and segments is the sink."""
    return lambda q, k, v, segments, sink, *scale: kernel(q, k, v, segments, *scale, sink_KG=sink)


def _with_equal_sizes(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A kernel that needs values as wide as queries and keys, for others: zeros are added to the narrower ones."""

    def padded(q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *rest: jax.Array) -> jax.Array:
        value_size = v_BTKH.shape[-1]
        size = kernel_head_size(q_BTKGH.shape[-1], value_size)
        pad = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])  # noqa: E731
        return kernel(pad(q_BTKGH), pad(k_BTKH), pad(v_BTKH), *rest)[..., :value_size]

    return padded


def _with_constant_scale(q_BTKGH: jax.Array, factor: float | jax.Array) -> tuple[jax.Array, float]:
    """Folds a traced scale into the queries, because some kernels take the scale as a compile-time constant."""
    if isinstance(factor, float):
        return q_BTKGH, factor
    return (q_BTKGH.astype(jnp.float32) * factor).astype(q_BTKGH.dtype), 1.0


def mask_and_distance(spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """Boolean and int32 [B, T, S]: whether each query attends to each key, and how many positions back the key is."""
    mask, window = spec.mask, spec.window
    queries, keys = (BATCH, POSITION), (BATCH, KEY_POSITION)
    t_BT, t_segment_BT = (a.rearrange(queries).array for a in (mask.positions, mask.segment_ids))
    s_BS, s_segment_BS = (a.rearrange(keys).array for a in (mask.key_positions, mask.key_segment_ids))
    same = (t_segment_BT[:, :, None] == s_segment_BS[:, None, :]) & (t_segment_BT != 0)[:, :, None]
    distance_BTS = t_BT[:, :, None] - s_BS[:, None, :]
    if spec.causal:
        same &= distance_BTS >= 0
    if window is not None:
        same &= (distance_BTS if spec.causal else jnp.abs(distance_BTS)) < window
    return same, distance_BTS
