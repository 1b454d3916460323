"""Dispatch: brings tokens to the devices that have the experts they chose, and the experts' outputs back.

If mesh axes shard both experts and tokens, devices exchange tokens:

    gather   all tokens are all-gathered over these axes, and the results are reduce-scattered back
    padded   all-to-all: a device sends one copy of a token to each device that has an expert of it, a fixed number to each
    ragged   the same, with as many as there are (`jaxlm.models.experts.ragged_exchange`)

t tokens on each of n devices with k experts per token: a device receives t (n - 1) rows with `gather`, and with the others
t (n - 1) (1 - (1 - 1 / n)^k) if the loads are even, which is what a `padded` device reserves, times the capacity.

Without a capacity, no token is dropped, and arrays are as large as all choices of one device need. With a capacity, choices
beyond it are dropped, the last tokens first: the sender (with `gather`, the receiver) decides it once, before experts run.

Source: Lepikhin et al. 2020 (arXiv:2006.16668), section 3.1 (all-to-all, capacity).

Shapes: B batch, S position, T tokens of a device, K experts per token, N = T x K, W devices, R tokens that a device receives,
P rows of this device's experts, D embed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import Mesh, PartitionSpec

from jaxlm.core.axes import BATCH, EXPERTS, MLP, POSITION
from jaxlm.core.products.stored_weights import Weight
from jaxlm.core.sharding import current_layout
from jaxlm.models.experts.grouped_products import MAX_BLOCK, Grouping
from jaxlm.models.experts.ragged_exchange import RaggedExchange
from jaxlm.models.experts.row_order import RowOrder
from jaxlm.models.token_sharding import mesh_axes


@dataclass(frozen=True)
class ExpertSharding:
    """Sharding of tokens and experts on the mesh.

    Attributes:
        mesh: None for a single device.
        batch, position: mesh axes that shard tokens.
        experts, mlp: mesh axes that shard experts, and the MLP features of each expert.
    """

    mesh: Mesh | None
    batch: tuple[str, ...] = ()
    position: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()

    @staticmethod
    def of(x: NamedArray, weight: Weight) -> "ExpertSharding":
        """The sharding of x {batch, position, ..} and a weight {experts, mlp, ..} under the current layout."""
        layout = current_layout()
        if layout is None or layout.mesh.size == 1:
            return ExpertSharding(None)
        batch, position = (mesh_axes(x.resolve_axis(axis), layout.compute) for axis in (BATCH, POSITION))
        experts, mlp = (mesh_axes(weight.resolve_axis(axis), layout.compute) for axis in (EXPERTS, MLP))
        return ExpertSharding(layout.mesh, batch, position, experts, mlp)

    def shard_map(self, local: Any, layers: Sequence[Any]) -> Any:
        """Runs `local(x_BSD, chosen_BSK, share_BSK, gate, up, down)` on each device's shard. Its results are of each token,
        and one for all.

        Args:
            layers: the last three arguments (`ExpertMatrices`).
        """
        if self.mesh is None:
            return local
        tokens = PartitionSpec(self.batch or None, self.position or None, None)
        into = PartitionSpec(self.experts or None, None, self.mlp or None)
        out = PartitionSpec(self.experts or None, self.mlp or None, None)
        # The collectives inside establish replication, which the check cannot infer.
        weight_specs = (layer.specs(spec) for layer, spec in zip(layers, (into, into, out), strict=True))
        specs = (tokens, tokens, tokens, *weight_specs)
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=specs, out_specs=(tokens, PartitionSpec()), check_vma=False
        )

    def once(self, bias_ED: jax.Array | None) -> jax.Array | None:
        """A bias of experts on the first of the devices that have slices of them, whose outputs are summed; 0 on others."""
        if bias_ED is None or not self.mlp:
            return bias_ED
        return jnp.where(jax.lax.axis_index(self.mlp) == 0, bias_ED, 0)

    def gather_tokens(self, a_BSX: jax.Array, names: Sequence[str]) -> jax.Array:
        """All-gathers the tokens of all devices along these mesh axes."""
        for name in reversed(names):
            a_BSX = jax.lax.all_gather(a_BSX, name, axis=self._dim(name), tiled=True)
        return a_BSX

    def scatter_tokens(self, a_BSX: jax.Array, names: Sequence[str]) -> jax.Array:
        """Sums the contributions of all experts and slices, and returns this device's own tokens."""
        for name in names:
            a_BSX = jax.lax.psum_scatter(a_BSX, name, scatter_dimension=self._dim(name), tiled=True)
        others = tuple(name for name in self.experts + self.mlp if name not in self.shared)
        return jax.lax.psum(a_BSX, others) if others else a_BSX

    def sum_choices(self, count: jax.Array) -> jax.Array:
        """Sums what devices count of the choices of their experts, or of those of their tokens that they send."""
        names = dict.fromkeys((*self.experts, *(n for n in self.batch + self.position if n not in self.shared)))
        return jax.lax.psum(count, tuple(names)) if names else count

    @property
    def shared(self) -> tuple[str, ...]:
        """Mesh axes that shard both tokens and experts, in the order in which they shard tokens, outermost first."""
        return tuple(name for name in self.batch + self.position if name in self.experts + self.mlp)

    @property
    def exchanged(self) -> tuple[str, ...]:
        """Those of them that shard the experts, not the features of each, in the order in which they do."""
        return tuple(name for name in self.experts if name in self.batch + self.position)

    def num_devices(self, names: Sequence[str]) -> int:
        """Number of devices along mesh axes."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[name] for name in names)

    def device_of(self, expert_X: jax.Array, num_local: int) -> jax.Array:
        """The number of the device along `exchanged` that has an expert, -1 for none of those that this one sends to."""
        device_X, found_X, is_one_X = expert_X // num_local, jnp.zeros_like(expert_X), expert_X >= 0
        for index, name in enumerate(self.experts):
            size = self.num_devices((name,))
            place_X = device_X // self.num_devices(self.experts[index + 1 :]) % size
            if name in self.exchanged:
                found_X = found_X * size + place_X
            else:
                is_one_X &= place_X == jax.lax.axis_index(name)
        return jnp.where(is_one_X, found_X, -1)

    def _dim(self, name: str) -> int:
        return 0 if name in self.batch else 1


GATHER, PADDED, RAGGED = "gather", "padded", "ragged"


@dataclass(frozen=True)
class Dispatched:
    """The tokens that chose this device's experts.

    Attributes:
        rows: a row for each token and expert, sorted by expert, [P, D]; once for `gate_proj` and once for `up_proj`.
        grouping: which rows are whose, and how many each expert has.
        share_RK: the shares of the experts of each token that the device has received.
        share_P1: those of the rows; None if `combine` multiplies the outputs by them, not `weighted` what `down_proj` reads.
        give_back: maps outputs of these tokens, [R, D], to the sums for each token of this device, [B, S, D].
        num_dropped: how many choices of all devices were dropped.
    """

    rows: tuple[jax.Array, ...]
    grouping: Grouping
    share_RK: jax.Array
    share_P1: jax.Array | None
    give_back: Callable[[jax.Array], jax.Array]
    num_dropped: jax.Array

    def weighted(self, hidden_PX: jax.Array) -> jax.Array:
        """Multiplies rows by their shares, unless `combine` does."""
        # The gradient of shares then needs no outputs, which the backward pass would compute again.
        return hidden_PX if self.share_P1 is None else hidden_PX * self.share_P1

    def combine(self, out_PD: jax.Array) -> jax.Array:
        """Sums the experts' outputs, times their shares, of each token of this device; returns [B, S, D]."""
        if self.share_P1 is not None:
            return self.give_back(self.grouping.order.sums(out_PD, self.share_RK.shape[1]))
        out_RKD = self.grouping.order.back(out_PD).reshape(*self.share_RK.shape, -1)
        return self.give_back(jnp.sum(out_RKD * self.share_RK[..., None], axis=1).astype(self.rows[0].dtype))


def dispatch(
    x_BSD: jax.Array,
    chosen_BSK: jax.Array,
    share_BSK: jax.Array,
    *,
    num_experts: int,
    sharding: ExpertSharding,
    backend: str = GATHER,
    capacity: float | None = None,
    largest_block: int = MAX_BLOCK,
) -> Dispatched:
    """Brings tokens to this device's experts. Called on each device's shard.

    Args:
        x_BSD: the device's tokens.
        chosen_BSK: the numbers of the experts that each of them chose; -1 for none.
        num_experts: number of experts on this device.
        capacity: how many choices a device computes, or with `padded`, sends to a device, relative to even loads.
        largest_block: of `Grouping`.
    """
    exchanged = () if backend == GATHER else sharding.exchanged
    gathered = tuple(name for name in sharding.shared if name not in exchanged)
    x_BSD, chosen_BSK, share_BSK = (sharding.gather_tokens(a, gathered) for a in (x_BSD, chosen_BSK, share_BSK))
    x_TD, chosen_TK, share_TK = (a.reshape(-1, a.shape[-1]) for a in (x_BSD, chosen_BSK, share_BSK))
    first = jax.lax.axis_index(sharding.experts) * num_experts if sharding.experts else 0
    mean = chosen_TK.size / sharding.num_devices(sharding.experts)  # for each device that has experts
    if not exchanged:
        local_TK, most, num_dropped = chosen_TK - first, None, jnp.zeros((), jnp.int32)
        if capacity is not None:
            is_mine_TK = (local_TK >= 0) & (local_TK < num_experts)
            most = _limit(capacity, mean, chosen_TK.size)
            is_kept_TK = is_mine_TK & (_rank(is_mine_TK.reshape(-1)).reshape(local_TK.shape) < most)
            num_dropped = jnp.sum(is_mine_TK & ~is_kept_TK)
            local_TK = jnp.where(is_kept_TK, local_TK, -1)
        arrived = x_TD, local_TK, share_TK
        give_back = lambda out_TD: out_TD  # noqa: E731
    else:
        size = sharding.num_devices(exchanged)
        device_TK = sharding.device_of(chosen_TK, num_experts)
        make = _padded if backend == PADDED else _ragged
        send, give_back, is_kept_TK, most = make(device_TK, exchanged, size, mean, capacity)
        num_dropped = jnp.sum((device_TK >= 0) & ~is_kept_TK)
        # Experts are numbered from 1 on the way: rows that nobody fills arrive as 0.
        *floats, chosen_RK = (send(a) for a in (x_TD, share_TK, jnp.where(is_kept_TK, chosen_TK, -1) + 1))
        arrived = floats[0], chosen_RK - 1 - first, floats[1]
    x_RD, local_RK, share_RK = arrived
    grouping = Grouping.of(local_RK.reshape(-1), num_experts, most, largest_block)
    return Dispatched(
        grouping.order.into_twice(x_RD, copies=local_RK.shape[1]),
        grouping,
        share_RK,
        grouping.order.into(share_RK.reshape(-1, 1)) if exchanged else None,
        lambda out_RD: sharding.scatter_tokens(give_back(out_RD).reshape(x_BSD.shape), gathered),
        sharding.sum_choices(num_dropped),
    )


def _limit(capacity: float, mean: float, count: int) -> int:
    """How many of `count` a device takes, of which it has `mean` with even loads."""
    return math.ceil(min(capacity * mean, count))


def _rank(is_one_X: jax.Array) -> jax.Array:
    """How many are before each along the first axis."""
    return jnp.cumsum(is_one_X, axis=0, dtype=jnp.int32) - 1


def _padded(device_TK: jax.Array, axes: tuple[str, ...], size: int, mean: float, capacity: float | None):
    """Returns (send, give back, which choices are kept, how many arrive at most)."""
    num_tokens, num_chosen = device_TK.shape
    is_sent_NW = device_TK.reshape(-1, 1) == jnp.arange(size)
    is_kept_NW, slots, most = is_sent_NW, num_tokens, None
    if capacity is not None:
        of_pair = _limit(capacity, mean, device_TK.size)
        is_kept_NW = is_sent_NW & (_rank(is_sent_NW) < of_pair)
        share = 1 - (1 - mean / device_TK.size) ** num_chosen  # of the tokens, with even loads
        slots, most = _limit(capacity, share * num_tokens, num_tokens), size * of_pair
    is_kept_TKW = is_kept_NW.reshape(num_tokens, num_chosen, size)
    has_copy_TW = jnp.any(is_kept_TKW, axis=1)
    slot_TW = _rank(has_copy_TW)
    has_slot_TW = has_copy_TW & (slot_TW < slots)
    place_TW = jnp.where(has_slot_TW, jnp.arange(size) * slots + slot_TW, size * slots)
    order = RowOrder.of(place_TW.reshape(-1), size * slots)
    exchange = lambda a: jax.lax.all_to_all(a, axes, 0, 0, tiled=True)  # noqa: E731
    send = lambda a: exchange(order.into(a, copies=size))  # noqa: E731
    give_back = lambda out_RD: order.sums(exchange(out_RD), size)  # noqa: E731
    return send, give_back, jnp.any(is_kept_TKW & has_slot_TW[:, None], axis=2), most


def _ragged(device_TK: jax.Array, axes: tuple[str, ...], size: int, mean: float, capacity: float | None):
    """As `_padded`."""
    num_tokens, num_chosen = device_TK.shape
    is_sent_NW = device_TK.reshape(-1, 1) == jnp.arange(size)
    is_kept_NW, received, most = is_sent_NW, size * num_tokens, None
    if capacity is not None:
        counts_WW = jax.lax.all_gather(jnp.sum(is_sent_NW, axis=0, dtype=jnp.int32), axes)
        before_W = (jnp.cumsum(counts_WW, axis=0) - counts_WW)[jax.lax.axis_index(axes)]
        most = _limit(capacity, size * mean, size * device_TK.size)
        is_kept_NW = is_sent_NW & (before_W + _rank(is_sent_NW) < most)
        received = min(received, most)
    is_kept_TKW = is_kept_NW.reshape(num_tokens, num_chosen, size)
    has_copy_TW = jnp.any(is_kept_TKW, axis=1)
    counts_W = jnp.sum(has_copy_TW, axis=0, dtype=jnp.int32)
    num_sent = num_tokens * min(size, num_chosen)
    place_TW = jnp.where(has_copy_TW, jnp.cumsum(counts_W) - counts_W + _rank(has_copy_TW), num_sent)
    order = RowOrder.of(place_TW.reshape(-1), num_sent)
    exchange = RaggedExchange.of(counts_W, num_sent, received, axes)
    send = lambda a: exchange.send(order.into(a, copies=size))  # noqa: E731
    give_back = lambda out_RD: order.sums(exchange.give_back(out_RD), size)  # noqa: E731
    return send, give_back, jnp.any(is_kept_TKW, axis=2), most
