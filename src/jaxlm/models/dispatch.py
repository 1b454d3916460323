"""Dispatch: brings tokens to the devices that have the experts they chose, and the experts' outputs back.

If a mesh axis shards both experts and tokens, tokens are all-gathered over the axis and the results are reduce-scattered
back.

Shapes: B batch, S position, K experts per token, N tokens x K, P rows of this device's experts, D embed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import Mesh, PartitionSpec

from jaxlm.core.axes import BATCH, EXPERTS, MLP, POSITION
from jaxlm.core.products.stored_weights import Weight
from jaxlm.core.sharding import current_layout
from jaxlm.models.grouped_products import Grouping
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
        """Runs `local(x_BSD, chosen_BSK, share_BSK, gate, up, down)` on each device's shard.

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
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=tokens, check_vma=False)

    def once(self, bias_ED: jax.Array | None) -> jax.Array | None:
        """A bias of experts on the first of the devices that have slices of them, whose outputs are summed; 0 on others."""
        if bias_ED is None or not self.mlp:
            return bias_ED
        return jnp.where(jax.lax.axis_index(self.mlp) == 0, bias_ED, 0)

    def gather_tokens(self, a_BSX: jax.Array) -> jax.Array:
        """All-gathers the tokens of all devices that share experts."""
        for name in reversed(self._shared):
            a_BSX = jax.lax.all_gather(a_BSX, name, axis=self._dim(name), tiled=True)
        return a_BSX

    def scatter_tokens(self, a_BSX: jax.Array) -> jax.Array:
        """Sums the contributions of all experts and slices, and returns this device's own tokens."""
        for name in self._shared:
            a_BSX = jax.lax.psum_scatter(a_BSX, name, scatter_dimension=self._dim(name), tiled=True)
        others = tuple(name for name in self.experts + self.mlp if name not in self._shared)
        return jax.lax.psum(a_BSX, others) if others else a_BSX

    @property
    def _shared(self) -> tuple[str, ...]:
        """Mesh axes that shard both tokens and experts, in the order in which they shard tokens, outermost first."""
        return tuple(name for name in self.batch + self.position if name in self.experts + self.mlp)

    def _dim(self, name: str) -> int:
        return 0 if name in self.batch else 1


class Dispatched(eqx.Module):
    """The tokens that chose this device's experts.

    Attributes:
        rows_PD: a row for each token and expert, sorted by expert.
        grouping: which rows are whose, and how many each expert has.
    """

    rows_PD: jax.Array
    grouping: Grouping
    sharding: ExpertSharding = eqx.field(static=True)

    def combine(self, out_PD: jax.Array, share_BSK: jax.Array) -> jax.Array:
        """Sums the experts' outputs, times their shares, of each token of this device; returns [B, S, D]."""
        share_BSK = self.sharding.gather_tokens(share_BSK)
        out_NKD = self.grouping.unsorted(out_PD).reshape(-1, share_BSK.shape[-1], out_PD.shape[-1])
        out_ND = jnp.sum(out_NKD * share_BSK.reshape(*out_NKD.shape[:2], 1), axis=1)
        out_BSD = out_ND.reshape(*share_BSK.shape[:2], -1).astype(self.rows_PD.dtype)
        return self.sharding.scatter_tokens(out_BSD)


def dispatch(x_BSD: jax.Array, chosen_BSK: jax.Array, *, num_experts: int, sharding: ExpertSharding) -> Dispatched:
    """Brings tokens to this device's experts. Called on each device's shard.

    Args:
        x_BSD: the device's tokens.
        chosen_BSK: the numbers of the experts that each of them chose.
        num_experts: number of experts on this device.
    """
    x_BSD, chosen_BSK = (sharding.gather_tokens(a) for a in (x_BSD, chosen_BSK))
    first = jax.lax.axis_index(sharding.experts) * num_experts if sharding.experts else 0
    grouping = Grouping.of(chosen_BSK.reshape(-1) - first, num_experts)
    tokens_TD = x_BSD.reshape(math.prod(x_BSD.shape[:2]), -1)
    return Dispatched(grouping.sorted(tokens_TD, copies=chosen_BSK.shape[-1]), grouping, sharding)
