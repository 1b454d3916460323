"""How attention is divided over devices: rows, heads, and the tokens of a row.

Source: exchanging tokens for heads: DeepSpeed-Ulysses, Jacobs et al. 2023 (arXiv:2309.14509); together with a ring: Fang and
Zhao 2024 (arXiv:2405.07719).

Shapes: B batch, T position, K key/value heads, G query heads per key/value head, H head size.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import Mesh, PartitionSpec

from jaxlm.core.axes import BATCH, HEADS, KV_HEADS, POSITION
from jaxlm.core.sharding import UNDIVIDED, ContextSharding, current_layout
from jaxlm.models.attention.context.keys import Keys, LatentKeys
from jaxlm.models.attention.context.other_keys import attend_gathered, attend_in_ring
from jaxlm.models.attention.context.partial import Factors, PartialAttention, Tokens
from jaxlm.models.token_sharding import mesh_axes

Kernel = Callable[..., jax.Array]


@dataclass(frozen=True)
class AttentionSharding:
    """Sharding of attention, for kernels that the partitioner cannot shard.

    Attributes:
        mesh: None for a single device.
        batch, heads, kv_heads: mesh axes that shard these axes.
        context: how devices divide the attention of the tokens of a row; no axes if each device computes that of whole rows.
    """

    mesh: Mesh | None = None
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()
    context: ContextSharding = UNDIVIDED

    @staticmethod
    def of(q: NamedArray, k: NamedArray) -> "AttentionSharding":
        """The sharding of queries {batch, position, heads, ...} and keys {kv_heads, ...} under the current layout."""
        layout = current_layout()
        if layout is None or layout.mesh.size == 1:
            return AttentionSharding()
        batch, heads = (mesh_axes(q.resolve_axis(a), layout.compute) for a in (BATCH, HEADS))
        kv_heads = mesh_axes(k.resolve_axis(KV_HEADS), layout.compute)
        # A prompt may have fewer tokens than there are devices.
        is_divided = q.axis_size(POSITION) % layout.num_shards(POSITION) == 0
        context = layout.context if is_divided else UNDIVIDED
        return AttentionSharding(layout.mesh, batch, heads, kv_heads, context)

    def shard_map(self, kernel: Kernel, latents: LatentKeys | None = None) -> Kernel:
        """Runs `kernel(q_BTKGH, k_BTKH, v_BTKH, segment_BT, by_head, *scalars)` on each device's rows and heads.

        The kernel gets whole rows. If positions are sharded, devices exchange tokens for heads (`context.heads`). Over other
        mesh axes, keys and queries are gathered. `by_head` is an array [K, G] or None.

        Args:
            latents: what devices exchange instead of keys and values; None for these.
        """
        if self.mesh is None:
            return kernel
        exchanged = self.context.heads if self.context.axes == self.context.heads else ()

        def run(q_BTKGH, k_BTKH, v_BTKH, segment_BT, by_head, *scalars) -> jax.Array:
            heads = _Heads.of(q_BTKGH, exchanged)
            own = jax.tree.map(heads.own, by_head)
            parts = (heads.queries(q_BTKGH), heads.keys(k_BTKH), heads.keys(v_BTKH))
            return heads.returned(kernel(*parts, heads.tokens(segment_BT), own, *scalars))

        def run_latents(q_BTKGH, latents_BTL, rotated_BTR, segment_BT, by_head, *scalars) -> jax.Array:
            heads = _Heads.of(q_BTKGH, exchanged)
            own, weight = jax.tree.map(heads.own, by_head)
            keys = LatentKeys(latents_BTL, rotated_BTR, weight).keys(exchanged, q_BTKGH.shape[-1])
            k, v = (jnp.moveaxis(a, 2, 1) for a in keys.expanded())
            return heads.returned(kernel(heads.queries(q_BTKGH), k, v, heads.tokens(segment_BT), own, *scalars))

        if latents is None or not exchanged:
            return self._sharded(run, exchanged, num_rows=1)
        sharded = self._sharded(run_latents, exchanged, num_rows=1, latents=True)
        return lambda q, _, __, segments, by_head, *scalars: sharded(
            q, latents.latents_BTL, latents.rotated_BTR, segments, (by_head, latents.weight_K1FL), *scalars
        )

    def divided(
        self,
        kernel: PartialAttention,
        q_BTKGH,
        k_BTKH,
        v_BTKH,
        positions_BT,
        segment_BT,
        scale: jax.Array,
        slopes_KG: jax.Array | None = None,
        sink_KG: jax.Array | None = None,
        latents: LatentKeys | None = None,
    ) -> jax.Array:
        """Attention of rows whose tokens, in any order, the devices of `context` divide; returns [B, T, K, G, H].

        Args:
            slopes_KG: of ALiBi; None without it.
            sink_KG: scores of a sink; None for none.
            latents: what devices exchange instead of keys and values; None for these.
        """
        context = self.context

        def run(q_BTKGH, first, second, positions_BT, segment_BT, by_head, scale) -> jax.Array:
            heads = _Heads.of(q_BTKGH, context.heads)
            slopes, sink, weight = jax.tree.map(heads.own, by_head)
            if weight is None:
                k, v = (jnp.moveaxis(heads.keys(a), 1, -2) for a in (first, second))
                keys = Keys((k, v))
            else:
                keys = LatentKeys(first, second, weight).keys(context.heads, q_BTKGH.shape[-1])
            tokens = Tokens(heads.tokens(positions_BT), heads.tokens(segment_BT))
            attend = attend_in_ring if context.ring else attend_gathered
            axes, q = context.ring or context.gather, jnp.moveaxis(heads.queries(q_BTKGH), 1, -2)
            out_BKGTH = attend(axes, kernel, q, keys, tokens, Factors(scale, slopes), sink)
            return heads.returned(jnp.moveaxis(out_BKGTH, -2, 1))

        first, second, weight = (k_BTKH, v_BTKH, None) if latents is None else latents
        arrays = (q_BTKGH, first, second, positions_BT, segment_BT, (slopes_KG, sink_KG, weight), scale)
        return self._sharded(run, context.axes, num_rows=2, latents=latents is not None)(*arrays)

    def _sharded(self, run: Kernel, positions: tuple[str, ...], *, num_rows: int, latents: bool = False) -> Kernel:
        """`run` on the shards of queries, keys, values, `num_rows` [B, T], a tree of [K, ...], and scalars.

        Args:
            latents: keys and values are [B, T, ...], without heads.
        """
        assert self.mesh is not None
        keys = PartitionSpec(self.batch or None, positions or None, self.heads or None)
        queries, rows = PartitionSpec(*keys, None), PartitionSpec(self.batch or None, positions or None)
        by_head = PartitionSpec(self.heads or None)

        def sharded(*arrays) -> jax.Array:
            named = (queries, *[rows if latents else keys] * 2, *[rows] * num_rows, by_head)
            specs = (*named, *[PartitionSpec()] * (len(arrays) - len(named)))
            # The kernels do not declare how their outputs vary over the mesh.
            return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=queries, check_vma=False)(*arrays)

        if latents or self.heads == self.kv_heads:
            return sharded
        return functools.partial(_with_repeated_keys, sharded, num_rows)


def _with_repeated_keys(kernel: Kernel, num_rows: int, q_BTKGH, k_BTKH, v_BTKH, *rest) -> jax.Array:
    """Repeats keys and values for each query head, because the key/value heads do not divide over the devices."""
    group = q_BTKGH.shape[3]
    q_ungrouped = q_BTKGH.reshape(*q_BTKGH.shape[:2], -1, 1, q_BTKGH.shape[4])
    by_head = jax.tree.map(lambda a: a.reshape(-1, 1), rest[num_rows])
    rest = (*rest[:num_rows], by_head, *rest[num_rows + 1 :])
    out = kernel(q_ungrouped, *(jnp.repeat(t, group, axis=2) for t in (k_BTKH, v_BTKH)), *rest)
    return out.reshape(*q_BTKGH.shape[:-1], -1)


@dataclass(frozen=True)
class _Heads:
    """The exchange of tokens for heads among the devices along some mesh axes, inside `jax.shard_map`.

    Attributes:
        axes: of the mesh; none for no exchange.
        kv_heads, group: of a device's shard.
        repeats: how often each key/value head is repeated, so that their number divides over the devices.
    """

    axes: tuple[str, ...]
    kv_heads: int
    group: int
    repeats: int

    @staticmethod
    def of(q_BTKGH: jax.Array, axes: tuple[str, ...]) -> "_Heads":
        kv_heads, group = q_BTKGH.shape[2:4]
        return _Heads(axes, kv_heads, group, head_repeats(kv_heads, group, jax.lax.axis_size(axes) if axes else 1))

    def queries(self, q_BTKGH: jax.Array) -> jax.Array:
        """All tokens of some heads, given some tokens of all heads."""
        q = q_BTKGH.reshape(*q_BTKGH.shape[:2], self.kv_heads * self.repeats, -1, q_BTKGH.shape[-1])
        return self._all_to_all(q, split=2, concat=1) if self.axes else q

    def keys(self, x_BTKH: jax.Array) -> jax.Array:
        """The same for keys or values."""
        x = x_BTKH if self.repeats == 1 else jnp.repeat(x_BTKH, self.repeats, axis=2)
        return self._all_to_all(x, split=2, concat=1) if self.axes else x

    def returned(self, out_BTKGH: jax.Array) -> jax.Array:
        """The inverse, for what attention returns."""
        out = self._all_to_all(out_BTKGH, split=1, concat=2) if self.axes else out_BTKGH
        return out.reshape(*out.shape[:2], self.kv_heads, self.group, -1)

    def tokens(self, column_BT: jax.Array) -> jax.Array:
        """Returns what a device knows of its tokens, for all tokens."""
        return jax.lax.all_gather(column_BT, self.axes, axis=1, tiled=True) if self.axes else column_BT

    def own(self, by_head_KG: jax.Array) -> jax.Array:
        """Numbers of all heads, [K, G] or [K, 1, ...], for those that a device has after the exchange."""
        by_head = by_head_KG.reshape(self.kv_heads * self.repeats, -1, *by_head_KG.shape[2:])
        if not self.axes:
            return by_head
        num_own = by_head.shape[0] // jax.lax.axis_size(self.axes)
        return jax.lax.dynamic_slice_in_dim(by_head, jax.lax.axis_index(self.axes) * num_own, num_own)

    def _all_to_all(self, x: jax.Array, *, split: int, concat: int) -> jax.Array:
        return jax.lax.all_to_all(x, self.axes, split_axis=split, concat_axis=concat, tiled=True)


def head_repeats(kv_heads: int, group: int, num_devices: int) -> int:
    """Counts the copies of each key/value head before devices exchange tokens for heads, so that the devices divide them.

    Args:
        group: query heads per key/value head, which the repeats must divide.

    Raises:
        ValueError: the query heads do not divide over the devices.
    """
    repeats = math.lcm(kv_heads, num_devices) // kv_heads
    if group % repeats:
        raise ValueError(
            f"{kv_heads * group} query heads in groups of {group} do not divide over {num_devices} devices"
        )
    return repeats
