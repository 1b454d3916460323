"""Softmax attention over packed documents: one function, behind which the backends stand.

Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1; grouped queries: Ainslie et al. 2023 (arXiv:2305.13245).

Shapes: B batch, T query positions, S key positions, K key/value heads, G query heads a key/value head, H head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import AxisSelector, NamedArray

from jaxlm.core.axes import BATCH, HEAD_SIZE, HEADS, KEY_POSITION, KV_HEADS, POSITION
from jaxlm.models.base import Inputs


def as_keys(x: NamedArray) -> NamedArray:
    """{position} renamed to {key_position}: the same tokens, as those that are looked at."""
    renames: dict[AxisSelector, AxisSelector] = {POSITION: KEY_POSITION}
    return x.rename(renames)


class Visibility(eqx.Module):
    """Who sees whom: a query sees the keys of its own segment at its own or an earlier position. Segment 0 sees nothing
    and is seen by nothing.

    Attributes:
        positions, segment_ids: int32 {batch, position}, of the queries.
        key_positions, key_segment_ids: int32 {batch, key_position}.
    """

    positions: NamedArray
    segment_ids: NamedArray
    key_positions: NamedArray
    key_segment_ids: NamedArray

    @staticmethod
    def within(inputs: Inputs) -> "Visibility":
        """The inputs among themselves."""
        return Visibility(inputs.positions, inputs.segment_ids, *map(as_keys, (inputs.positions, inputs.segment_ids)))


@dataclass(frozen=True)
class AttentionChoice:
    """The backend that attention runs on, and why that one."""

    name: str
    reason: str


def choose_attention(platform: str) -> AttentionChoice:
    """The attention backend for a platform (`cpu`, `gpu`, `tpu`), decided once and shown in the start-up table."""
    if platform == "cpu":
        return AttentionChoice("xla", "fused attention kernels exist for GPUs and TPUs only")
    return AttentionChoice("xla", f"no fused backend for {platform} is built in; scores take position^2 memory")


def attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    visibility: Visibility,
    *,
    scale: float | jax.Array | None = None,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> NamedArray:
    """Each query's mean of the values that it sees, weighted by the softmax of its scores; 0 where it sees none.

    Scores and softmax are float32; the weights are rounded to the values' dtype before they meet them.

    Args:
        q: {batch, position, heads, head_size}. Query head h reads key/value head h // (heads / kv_heads).
        k, v: {batch, key_position, kv_heads, head_size}.
        scale: what scores are multiplied by; None means 1 / sqrt(head_size).
        dropout: the probability of dropping a weight; without `key` nothing is dropped.

    Returns:
        {batch, position, heads, head_size} in the dtype of `v`.
    """
    q = q.rearrange((BATCH, POSITION, HEADS, HEAD_SIZE))
    k, v = (a.rearrange((BATCH, KEY_POSITION, KV_HEADS, HEAD_SIZE)) for a in (k, v))
    num_heads, num_kv_heads = q.axis_size(HEADS), k.axis_size(KV_HEADS)
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    scale = q.axis_size(HEAD_SIZE) ** -0.5 if scale is None else scale
    backend = _BACKENDS[choose_attention(jax.default_backend()).name]
    out = backend(q.array, k.array, v.array, _mask(visibility), scale, dropout, key)
    return NamedArray(out, q.axes)


def _mask(visibility: Visibility) -> jax.Array:
    """[B, T, S], true where a query may look."""
    queries, keys = (BATCH, POSITION), (BATCH, KEY_POSITION)
    t_BT, t_segment_BT = (a.rearrange(queries).array for a in (visibility.positions, visibility.segment_ids))
    s_BS, s_segment_BS = (a.rearrange(keys).array for a in (visibility.key_positions, visibility.key_segment_ids))
    same = t_segment_BT[:, :, None] == s_segment_BS[:, None, :]
    return same & (t_segment_BT != 0)[:, :, None] & (s_BS[:, None, :] <= t_BT[:, :, None])


def _xla_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale, dropout, key):
    num_kv_heads = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(*q_BTNH.shape[:2], num_kv_heads, -1, q_BTNH.shape[3])
    scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * scale
    # A finite floor: a row without any key becomes an even softmax, finite both ways, and is zeroed after.
    mask = mask_BTS[:, None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1)
    weights = jnp.where(mask.any(axis=-1, keepdims=True), weights, 0.0)
    if key is not None and dropout > 0:
        weights = jnp.where(jax.random.bernoulli(key, 1 - dropout, weights.shape), weights / (1 - dropout), 0.0)
    out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v_BSKH.dtype), v_BSKH)
    return out.reshape(q_BTNH.shape)


_BACKENDS: dict[str, Callable[..., jax.Array]] = {"xla": _xla_attention}
