"""Dropless mixture of experts (MoE): a router sends each token to a few MLPs, and no token is dropped.

Source: Shazeer et al. 2017 (arXiv:1701.06538), section 2. `jaxlm.models.routing` has the routers.

On a mesh, each device computes the experts (or slices of experts) that it holds. If a mesh axis shards both experts and
tokens, tokens are all-gathered over the axis and the results are reduce-scattered back.

Shapes: B batch, S position, K experts per token, N tokens x K, P the same padded to blocks, E experts on this device, M
mlp, D embed.

Grouped matrix products use the blocks of MegaBlocks, Gale et al. 2022 (arXiv:2211.15841), section 5: rows are sorted by
group, and each group is padded to whole blocks, so that each block is multiplied by one matrix. TPUs use
`jax.lax.ragged_dot`; elsewhere XLA would multiply every row by every matrix, so a loop runs over the blocks.

Shapes of grouped products: N unsorted rows, P rows in blocks, R rows of a block, G groups, I input features, O output
features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, EMBED, EXPERTS, MLP, POSITION, VOCAB, axes_of
from jaxlm.core.parameters import SCALE, DeclaresParameters, Parameter
from jaxlm.core.products.matmul import arranged, array_specs, dot, einsum, operand
from jaxlm.core.products.stored_weights import StoredArray, StoredWeight, Weight
from jaxlm.core.sharding import Layout, current_layout, current_platform
from jaxlm.core.tracing import CustomVjp
from jaxlm.models.activations import gated
from jaxlm.models.layers import GatedMlp
from jaxlm.models.linear import ExpertLinear, Linear
from jaxlm.models.remat import EXPERT
from jaxlm.models.routing import RouterStats, Routing
from jaxlm.models.token_sharding import mesh_axes


class Experts(eqx.Module):
    """A mixture of gated MLPs: the chosen experts' outputs, weighted by their shares.

    Attributes:
        router: embed to routes, one per expert: the logits.
        routing: chooses experts by the logits.
        gate_proj, up_proj: embed to mlp, per expert.
        down_proj: mlp to embed, per expert.
    """

    router: Linear
    gate_proj: ExpertLinear
    up_proj: ExpertLinear
    down_proj: ExpertLinear
    routing: Routing
    activation: str = eqx.field(static=True)

    def __call__(
        self, x: NamedArray, segment_ids: NamedArray, routed_by: NamedArray | None = None
    ) -> tuple[NamedArray, RouterStats]:
        """Maps {batch, position, embed} to the same shape; also returns the router's statistics.

        Args:
            segment_ids: of the tokens; 0 is padding, which the statistics ignore.
            routed_by: what the router reads, with the axes of x; None for x.
        """
        read = x if routed_by is None else routed_by
        routes = self.routing(self.router(self.router.operand(read)), segment_ids)
        out = self._apply_experts(x, routes.ids.array, routes.shares.array.astype(x.dtype))
        return out, routes.stats

    def _apply_experts(self, x: NamedArray, chosen_BSK: jax.Array, share_BSK: jax.Array) -> NamedArray:
        """The chosen experts' outputs, weighted and summed."""
        x = x.rearrange((BATCH, POSITION, EMBED))
        into_mlp, out_of_mlp = (EXPERTS, EMBED, MLP), (EXPERTS, MLP, EMBED)
        weights = [
            arranged(layer.weight, order)
            for layer, order in ((self.gate_proj, into_mlp), (self.up_proj, into_mlp), (self.down_proj, out_of_mlp))
        ]
        sharding = ExpertSharding.of(x, self.gate_proj.weight)

        def local(x_BSD, chosen_BSK, share_BSK, gate_EDM, up_EDM, down_EMD):
            x_BSD, chosen_BSK, share_BSK = (sharding.gather_tokens(a) for a in (x_BSD, chosen_BSK, share_BSK))
            first = jax.lax.axis_index(sharding.experts) * gate_EDM.shape[0] if sharding.experts else 0
            return sharding.scatter_tokens(
                self._local_experts(x_BSD, chosen_BSK, share_BSK, gate_EDM, up_EDM, down_EMD, first=first)
            )

        run = sharding.shard_map(local, weights)
        return hax.auto_sharded(NamedArray(run(x.array, chosen_BSK, share_BSK, *weights), x.axes))

    def _local_experts(self, x_BSD, chosen_BSK, share_BSK, gate_EDM, up_EDM, down_EMD, *, first) -> jax.Array:
        """The weighted sum of the outputs of this device's experts, which start at number `first`."""
        num_tokens, width = math.prod(x_BSD.shape[:2]), x_BSD.shape[-1]
        grouping = Grouping.of(chosen_BSK.reshape(-1) - first, gate_EDM.shape[0])
        x_PD = grouping.sorted(jnp.repeat(x_BSD.reshape(num_tokens, width), self.routing.num_chosen, axis=0))
        gate_PM, up_PM = (checkpoint_name(grouping.dot(x_PD, w_EDM), EXPERT) for w_EDM in (gate_EDM, up_EDM))
        out_PD = checkpoint_name(grouping.dot(gated(self.activation, gate_PM, up_PM), down_EMD), EXPERT)
        out_NKD = grouping.unsorted(out_PD).reshape(num_tokens, self.routing.num_chosen, width)
        return jnp.sum(out_NKD * share_BSK.reshape(num_tokens, -1, 1), axis=1).reshape(x_BSD.shape).astype(x_BSD.dtype)


class SharedExpert(DeclaresParameters):
    """An MLP that every token goes through, times sigmoid(gate . x).

    Attributes:
        gate: {embed}; None leaves out the factor.
    """

    mlp: GatedMlp
    gate: NamedArray | None

    def __call__(self, x: NamedArray) -> NamedArray:
        if self.gate is None:
            return self.mlp(x)
        share = hax.nn.sigmoid(dot(x, self.gate, EMBED)).astype(x.dtype)
        return self.mlp(x) * share

    def parameters(self) -> dict[str, Parameter]:
        return {"gate": SCALE}


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

    def shard_map(self, local: Any, weights: Sequence[Any]) -> Any:
        """Runs `local(x_BSD, chosen_BSK, share_BSK, gate_EDM, up_EDM, down_EMD)` on each device's shard.

        Args:
            weights: the last three arguments.
        """
        if self.mesh is None:
            return local
        tokens = PartitionSpec(self.batch or None, self.position or None, None)
        into = PartitionSpec(self.experts or None, None, self.mlp or None)
        out = PartitionSpec(self.experts or None, self.mlp or None, None)
        # The collectives inside establish replication, which the check cannot infer.
        weight_specs = (array_specs(*pair) for pair in zip(weights, (into, into, out), strict=True))
        specs = (tokens, tokens, tokens, *weight_specs)
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=tokens, check_vma=False)

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


def check_expert_sharding(model: Any, layout: Layout) -> None:
    """Raises `ConfigError` if stored weights of a model's experts cannot be cut as on a mesh. Called with shapes."""
    for layer in tree.modules(model, ExpertLinear) if layout.mesh.size > 1 else ():
        if isinstance(weight := layer.weight, StoredWeight):
            weight.check_cut([name for name in (EXPERTS, MLP) if mesh_axes(weight.resolve_axis(name), layout.compute)])


def num_active(model: Any) -> int:
    """Number of parameters that are active for one token: all except those of the experts it is not routed to."""
    inactive = 0
    for experts in tree.modules(model, Experts):
        expert_size = sum(layer.weight.size for layer in (experts.gate_proj, experts.up_proj, experts.down_proj))
        num_experts = experts.gate_proj.weight.axis_size(EXPERTS)
        inactive += expert_size * (num_experts - experts.routing.num_chosen) // num_experts
    return tree.num_parameters(model) - inactive


def num_multiplied(part: Any, model: Any) -> int:
    """Number of weights in matrix products that a part of a model has, of those that are active for one token.

    Args:
        part: the model with None in place of other leaves.
    """
    total = sum(layer.weight.size for layer in tree.modules(part, Linear) if jax.tree.leaves(layer.weight))
    for experts in tree.modules(part, Experts):
        for layer in (experts.gate_proj, experts.up_proj, experts.down_proj):
            if jax.tree.leaves(layer.weight):
                total += layer.weight.size * experts.routing.num_chosen // layer.weight.axis_size(EXPERTS)
    gates = (shared.gate for shared in tree.modules(part, SharedExpert))
    total += sum(gate.size for gate in gates if gate is not None)
    layers = tree.modules(model, Linear)
    if layers and not any(VOCAB in [axis.name for axis in axes_of(layer.Out)] for layer in layers):
        tables = (leaf for _, leaf in tree.leaves(part) if tree.is_named(leaf))  # the head is the token embedding
        total += sum(leaf.size for leaf in tables if {axis.name for axis in leaf.axes} == {VOCAB, EMBED})
    return total


_MAX_BLOCK, _MIN_BLOCK = 512, 8


class Grouping(eqx.Module):
    """The permutation that sorts rows by group and pads each group to whole blocks.

    Attributes:
        source_P: the unsorted row at each sorted position; N for padding.
        place_N: the sorted position of each row; P for rows of no group.
        sizes_G: number of rows of each group, including padding.
        block: number of rows per block.
    """

    source_P: jax.Array
    place_N: jax.Array
    sizes_G: jax.Array
    block: int = eqx.field(static=True)

    @staticmethod
    def of(group_N: jax.Array, num_groups: int) -> "Grouping":
        """Sorts rows by group.

        Args:
            group_N: group of each row. Rows with a group outside [0, num_groups) are left out.
        """
        num_rows = group_N.shape[0]
        block = block_rows(num_rows, num_groups)
        group_N = jnp.where((group_N >= 0) & (group_N < num_groups), group_N, num_groups)
        order_N = jnp.argsort(group_N, stable=True)
        rank_N = (
            jnp.zeros(num_rows, jnp.int32).at[order_N].set(jnp.arange(num_rows, dtype=jnp.int32), unique_indices=True)
        )
        counts_G = jnp.sum(group_N[:, None] == jnp.arange(num_groups), axis=0, dtype=jnp.int32)
        sizes_G = -(-counts_G // block) * block
        shift_G = jnp.cumsum(sizes_G) - sizes_G - (jnp.cumsum(counts_G) - counts_G)
        num_positions = (-(-num_rows // block) + num_groups) * block
        place_N = jnp.where(group_N < num_groups, rank_N + shift_G[jnp.minimum(group_N, num_groups - 1)], num_positions)
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        source_P = jnp.full(num_positions, num_rows, jnp.int32).at[place_N].set(rows, mode="drop")
        return Grouping(source_P, place_N, sizes_G, block)

    def sorted(self, x_ND: jax.Array) -> jax.Array:
        """Rows in sorted order, [P, D]; padding is 0."""
        return _permute(x_ND, self.source_P, self.place_N)

    def unsorted(self, x_PD: jax.Array) -> jax.Array:
        """Rows in the original order, [N, D]; rows of no group are 0."""
        return _permute(x_PD, self.place_N, self.source_P)

    def dot(self, x_PI: jax.Array, w_GIO: jax.Array | StoredArray) -> jax.Array:
        """Multiplies each row by its group's matrix; returns [P, O] in the dtype of `operand`."""
        x_PI = operand(x_PI, w_GIO)
        if current_platform() == "tpu":
            if isinstance(w_GIO, StoredArray):
                return _stored_ragged_dot(x_PI, w_GIO, self.sizes_G)
            return jax.lax.ragged_dot(x_PI, w_GIO, self.sizes_G)
        num_blocks = x_PI.shape[0] // self.block
        ends_G = jnp.cumsum(self.sizes_G) // self.block
        # Blocks after the last group are 0, so any matrix will do.
        group_B = jnp.minimum(jnp.searchsorted(ends_G, jnp.arange(num_blocks), side="right"), len(ends_G) - 1)
        products = _stored_block_products if isinstance(w_GIO, StoredArray) else _block_products
        out_BRO = products(x_PI.reshape(num_blocks, self.block, -1), w_GIO, group_B)
        return out_BRO.reshape(x_PI.shape[0], -1)


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows per block: large enough for efficient matrix products, small enough that padding adds about a quarter."""
    target = num_rows // (4 * num_groups)
    return min(_MAX_BLOCK, max(_MIN_BLOCK, 1 << max(target, 1).bit_length() - 1))


# The derivative of a gather is a scatter-add, which is slow and, on GPUs, nondeterministic. For a permutation it can be
# a gather, too.
@CustomVjp
def _permute(x_ND: jax.Array, source_P: jax.Array, place_N: jax.Array) -> jax.Array:
    del place_N
    return x_ND.at[source_P].get(mode="fill", fill_value=0)


def _permute_forward(x_ND, source_P, place_N):
    return _permute(x_ND, source_P, place_N), (source_P, place_N)


def _permute_backward(residuals, d_out):
    source_P, place_N = residuals
    return _permute(d_out, place_N, source_P), None, None


_permute.defvjp(_permute_forward, _permute_backward)


def _define_block_products(x_BRI: jax.Array, w_GIO: jax.Array | StoredArray, group_B: jax.Array) -> jax.Array:
    def one_block(_, block):
        x_RI, group = block
        w_IO = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, group, keepdims=False), w_GIO)
        return None, einsum("ri,io->ro", x_RI, w_IO)

    return jax.lax.scan(one_block, None, (x_BRI, group_B))[1]


# Products with stored weights save their stored form, and make the floats of an expert again in the backward pass.
# Otherwise the loops over blocks and layers would save the floats of all of them.
_stored_block_products = CustomVjp(_define_block_products)


def _stored_block_products_forward(x_BRI, w_GIO, group_B):
    return _define_block_products(x_BRI, w_GIO, group_B), (w_GIO, group_B, jnp.zeros((), x_BRI.dtype))


def _stored_block_products_backward(residuals, d_out_BRO):
    w_GIO, group_B, zero = residuals

    def one_block(_, block):
        d_out_RO, group = block
        w_IO = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, group, keepdims=False), w_GIO)
        x_RI = jax.ShapeDtypeStruct((d_out_RO.shape[0], w_IO.shape[0]), zero.dtype)
        return None, *jax.linear_transpose(lambda x_RI: einsum("ri,io->ro", x_RI, w_IO), x_RI)(d_out_RO)

    return jax.lax.scan(one_block, None, (d_out_BRO, group_B))[1], None, None


_stored_block_products.defvjp(_stored_block_products_forward, _stored_block_products_backward)


@CustomVjp
def _stored_ragged_dot(x_PI: jax.Array, w_GIO: StoredArray, sizes_G: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x_PI, w_GIO.floats(x_PI.dtype), sizes_G)


def _stored_ragged_dot_forward(x_PI, w_GIO, sizes_G):
    return _stored_ragged_dot(x_PI, w_GIO, sizes_G), (w_GIO, sizes_G, jnp.zeros((), x_PI.dtype))


def _stored_ragged_dot_backward(residuals, d_out_PO):
    (w_GIO, sizes_G, zero), d_out_PO = jax.lax.optimization_barrier((residuals, d_out_PO))
    floats_GOI = jnp.swapaxes(w_GIO.floats(zero.dtype), 1, 2)
    return jax.lax.ragged_dot(d_out_PO, floats_GOI, sizes_G).astype(zero.dtype), None, None


_stored_ragged_dot.defvjp(_stored_ragged_dot_forward, _stored_ragged_dot_backward)

_block_products = CustomVjp(_define_block_products)


def _block_products_forward(x_BRI, w_GIO, group_B):
    return _block_products(x_BRI, w_GIO, group_B), (x_BRI, w_GIO, group_B)


def _block_products_backward(residuals, d_out_BRO):
    x_BRI, w_GIO, group_B = residuals

    def one_block(d_w_GIO, block):
        x_RI, d_out_RO, group = block
        d_x_RI = d_out_RO @ jax.lax.dynamic_index_in_dim(w_GIO, group, keepdims=False).T
        piece_IO = jnp.matmul(x_RI.T, d_out_RO, preferred_element_type=jnp.float32)
        return d_w_GIO.at[group].add(piece_IO), d_x_RI

    start = jnp.zeros(w_GIO.shape, jnp.float32)
    d_w_GIO, d_x_BRI = jax.lax.scan(one_block, start, (x_BRI, d_out_BRO, group_B))
    return d_x_BRI, d_w_GIO.astype(w_GIO.dtype), None


_block_products.defvjp(_block_products_forward, _block_products_backward)
