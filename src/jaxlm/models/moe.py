"""Mixtures of experts: feed-forward networks of which a router picks a few for each token, and no token is dropped.

Source: Shazeer et al. 2017 (arXiv:1701.06538), section 2, with the softmax before the choice as in Mixtral (Jiang et al.
2024, arXiv:2401.04088, section 2.1). The balance of the load: Fedus et al. 2021, Switch Transformer (arXiv:2101.03961),
equations 4 to 6, over all layers at once. The router's z-loss: Zoph et al. 2022, ST-MoE (arXiv:2202.08906), equation 5.

On a mesh every device works for the experts (or the slices of experts) that it holds. Where the mesh axis that spreads
experts spreads tokens too, tokens come to all experts of the axis, and the results are summed back to where they belong.

Shapes: B batch, S position, K experts a token, N tokens x K, P the same in blocks, E experts here, M mlp, D embed.

Products by group: the blocks of Gale et al. 2022, MegaBlocks (arXiv:2211.15841), section 5: rows are sorted by group, and
each group is filled up to whole blocks, so that a block meets one matrix. `jax.lax.ragged_dot` is what TPUs have for this;
elsewhere XLA computes it as if every row met every matrix, so here a loop walks over the blocks.

Shapes of these: N rows as they come, P rows in blocks, R rows of a block, G groups, I features in, O features out.
"""

import math
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
from jaxlm.core.axes import BATCH, EMBED, EXPERTS, LAYERS, MLP, POSITION, ROUTES
from jaxlm.core.custom_vjp import CustomVjp
from jaxlm.core.sharding import current_layout, current_platform
from jaxlm.core.types import Sum
from jaxlm.models.activations import gated
from jaxlm.models.base import AuxLoss
from jaxlm.models.linear import ExpertLinear, Linear
from jaxlm.models.remat import EXPERT
from jaxlm.models.token_sharding import mesh_axes


class RouterStats(eqx.Module):
    """What routers did, as sums over tokens that are no padding; float32, {layers} in front once layers are stacked.

    Attributes:
        chosen: {routes}, how often each was chosen.
        probabilities: {routes}, before the choice.
        squares: {}, of the logarithm of the softmax's denominator.
        tokens: {}, how many there were.
        balance_weight, z_weight: the coefficients of the two losses.
        num_chosen: experts a token.
    """

    chosen: NamedArray
    probabilities: NamedArray
    squares: NamedArray
    tokens: NamedArray
    balance_weight: float = eqx.field(static=True)
    z_weight: float = eqx.field(static=True)
    num_chosen: int = eqx.field(static=True)

    def aux_losses(self) -> dict[str, AuxLoss]:
        """Of all layers: how even the load is (1 for each of a token's experts at best), z-loss, and the fullest expert's
        load as a multiple of an even one."""
        num_experts, num_layers = self.chosen.axis_size(ROUTES), self.chosen.axis_size(LAYERS)
        weight = self.tokens.array[0]
        num_tokens = jnp.maximum(weight, 1.0)
        chosen_LE = self.chosen.rearrange((LAYERS, ROUTES)).array / num_tokens
        probabilities_LE = self.probabilities.rearrange((LAYERS, ROUTES)).array / num_tokens
        balance = num_experts * jnp.sum(chosen_LE.mean(axis=0) * probabilities_LE.mean(axis=0))
        most = jax.lax.stop_gradient(jnp.max(chosen_LE)) * num_experts / self.num_chosen
        return {
            "router/balance_loss": AuxLoss(Sum(balance * weight, weight), self.balance_weight),
            "router/z_loss": AuxLoss(Sum(jnp.sum(self.squares.array) / num_layers, weight), self.z_weight),
            "router/max_load": AuxLoss(Sum(most * weight, weight), 0.0),
        }


class Experts(eqx.Module):
    """The sum of a few gated feed-forward networks, weighted by the router's probabilities.

    Attributes:
        router: embed to routes, one for each expert.
        gate_proj, up_proj: embed to mlp, of each expert.
        down_proj: mlp to embed, of each expert.
        num_chosen: experts a token.
        normalised: whether the chosen ones' probabilities are made to sum to 1.
        balance_weight, z_weight: what the router's losses are multiplied by.
    """

    router: Linear
    gate_proj: ExpertLinear
    up_proj: ExpertLinear
    down_proj: ExpertLinear
    activation: str = eqx.field(static=True)
    num_chosen: int = eqx.field(static=True)
    normalised: bool = eqx.field(static=True)
    balance_weight: float = eqx.field(static=True)
    z_weight: float = eqx.field(static=True)

    def __call__(self, x: NamedArray, segment_ids: NamedArray) -> tuple[NamedArray, RouterStats]:
        """{batch, position, embed} to the same, and what the router did. Args: segment_ids: of the tokens; 0 is padding."""
        logits = self.router(x).astype(jnp.float32)
        Route = logits.resolve_axis(ROUTES)
        probabilities = hax.nn.softmax(logits, axis=Route)
        order = (BATCH, POSITION, ROUTES)
        share_BSK, chosen_BSK = jax.lax.top_k(probabilities.rearrange(order).array, self.num_chosen)
        if self.normalised:
            share_BSK = share_BSK / jnp.sum(share_BSK, axis=-1, keepdims=True)
        out = self._through(x, chosen_BSK, share_BSK.astype(x.dtype))
        segment_ids = segment_ids.rearrange((BATCH, POSITION))
        real = NamedArray((segment_ids.array != 0).astype(jnp.float32), segment_ids.axes)
        hits_BSE = jnp.sum(chosen_BSK[..., None] == jnp.arange(Route.size), axis=2)
        tokens = (BATCH, POSITION)
        sums = RouterStats(
            chosen=hax.sum(hax.named(hits_BSE, (*real.axes, Route)) * real, tokens),
            probabilities=hax.sum(probabilities * real, tokens),
            squares=hax.sum(hax.nn.logsumexp(logits, Route) ** 2 * real, tokens),
            tokens=hax.sum(real, tokens),
            balance_weight=self.balance_weight,
            z_weight=self.z_weight,
            num_chosen=self.num_chosen,
        )
        return out, sums

    def _through(self, x: NamedArray, chosen_BSK: jax.Array, share_BSK: jax.Array) -> NamedArray:
        """The chosen experts' outputs, weighted and summed."""
        x = x.rearrange((BATCH, POSITION, EMBED))
        first, second = (EXPERTS, EMBED, MLP), (EXPERTS, MLP, EMBED)
        weights = [
            layer.weight.rearrange(order).array
            for layer, order in ((self.gate_proj, first), (self.up_proj, first), (self.down_proj, second))
        ]
        place = ExpertSharding.of(x, self.gate_proj.weight)

        def local(x_BSD, chosen_BSK, share_BSK, gate_EDM, up_EDM, down_EMD):
            x_BSD, chosen_BSK, share_BSK = (place.to_experts(a) for a in (x_BSD, chosen_BSK, share_BSK))
            first = place.first_expert(len(gate_EDM))
            return place.to_tokens(
                self._experts_here(x_BSD, chosen_BSK, share_BSK, gate_EDM, up_EDM, down_EMD, first=first)
            )

        return hax.auto_sharded(NamedArray(place.mapped(local)(x.array, chosen_BSK, share_BSK, *weights), x.axes))

    def _experts_here(self, x_BSD, chosen_BSK, share_BSK, gate_EDM, up_EDM, down_EMD, *, first) -> jax.Array:
        """What the experts from number `first` on add to each token."""
        num_tokens, width = math.prod(x_BSD.shape[:2]), x_BSD.shape[-1]
        grouping = Grouping.of(chosen_BSK.reshape(-1) - first, len(gate_EDM))
        x_PD = grouping.sorted(jnp.repeat(x_BSD.reshape(num_tokens, width), self.num_chosen, axis=0))
        gate_PM, up_PM = (checkpoint_name(grouping.dot(x_PD, w_EDM), EXPERT) for w_EDM in (gate_EDM, up_EDM))
        out_PD = checkpoint_name(grouping.dot(gated(self.activation, gate_PM, up_PM), down_EMD), EXPERT)
        out_NKD = grouping.unsorted(out_PD).reshape(num_tokens, self.num_chosen, width)
        return jnp.sum(out_NKD * share_BSK.reshape(num_tokens, -1, 1), axis=1).reshape(x_BSD.shape)


@dataclass(frozen=True)
class ExpertSharding:
    """How tokens and experts lie on the mesh.

    Attributes:
        mesh: None where there is one device.
        batch, position: the mesh axes over which tokens are spread.
        experts, mlp: those over which experts, and the features inside of each, are spread.
    """

    mesh: Mesh | None
    batch: tuple[str, ...] = ()
    position: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()

    @staticmethod
    def of(x: NamedArray, weight: NamedArray) -> "ExpertSharding":
        """Under the current layout, of {batch, position, ..} and {experts, mlp, ..}."""
        layout = current_layout()
        if layout is None or layout.mesh.size == 1:
            return ExpertSharding(None)
        batch, position = (mesh_axes(x.resolve_axis(axis), layout.compute) for axis in (BATCH, POSITION))
        experts, mlp = (mesh_axes(weight.resolve_axis(axis), layout.compute) for axis in (EXPERTS, MLP))
        return ExpertSharding(layout.mesh, batch, position, experts, mlp)

    def mapped(self, local: Any) -> Any:
        """`local(x_BSD, chosen_BSK, share_BSK, gate_EDM, up_EDM, down_EMD)` on every device's own part."""
        if self.mesh is None:
            return local
        tokens = PartitionSpec(self.batch or None, self.position or None, None)
        into = PartitionSpec(self.experts or None, None, self.mlp or None)
        out = PartitionSpec(self.experts or None, self.mlp or None, None)
        # Sums and scatters here say themselves what is replicated.
        specs = (tokens, tokens, tokens, into, into, out)
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=tokens, check_vma=False)

    def first_expert(self, num_here: int) -> jax.Array | int:
        """The number of the first expert that this device holds."""
        return jax.lax.axis_index(self.experts) * num_here if self.experts else 0

    def to_experts(self, a_BSX: jax.Array) -> jax.Array:
        """The tokens of all devices among which experts are divided."""
        for name in reversed(self._shared):
            a_BSX = jax.lax.all_gather(a_BSX, name, axis=self._dim(name), tiled=True)
        return a_BSX

    def to_tokens(self, a_BSX: jax.Array) -> jax.Array:
        """The sum of what all experts and slices have added, of this device's own tokens."""
        for name in self._shared:
            a_BSX = jax.lax.psum_scatter(a_BSX, name, scatter_dimension=self._dim(name), tiled=True)
        others = tuple(name for name in self.experts + self.mlp if name not in self._shared)
        return jax.lax.psum(a_BSX, others) if others else a_BSX

    @property
    def _shared(self) -> tuple[str, ...]:
        """Mesh axes over which both tokens and experts are spread, as the tokens are, outermost first."""
        return tuple(name for name in self.batch + self.position if name in self.experts + self.mlp)

    def _dim(self, name: str) -> int:
        return 0 if name in self.batch else 1


def num_active(model: Any) -> int:
    """Parameters that a token meets: all but those of the experts that are not chosen for it."""
    idle = 0
    for experts in tree.modules(model, Experts):
        in_experts = sum(layer.weight.size for layer in (experts.gate_proj, experts.up_proj, experts.down_proj))
        num_experts = experts.gate_proj.weight.axis_size(EXPERTS)
        idle += in_experts * (num_experts - experts.num_chosen) // num_experts
    return tree.num_parameters(model) - idle


_LARGEST_BLOCK, _SMALLEST_BLOCK = 512, 8


class Grouping(eqx.Module):
    """Where rows lie once they are sorted by group.

    Attributes:
        source_P: which of the rows lies there; N where none does.
        place_N: where each row lies; P for those of no group.
        sizes_G: rows of each group, those that fill its blocks up included.
        block: rows of a block.
    """

    source_P: jax.Array
    place_N: jax.Array
    sizes_G: jax.Array
    block: int = eqx.field(static=True)

    @staticmethod
    def of(group_N: jax.Array, num_groups: int) -> "Grouping":
        """Args: group_N: of each row; anything outside of [0, num_groups) belongs to none."""
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
        num_places = (-(-num_rows // block) + num_groups) * block
        place_N = jnp.where(group_N < num_groups, rank_N + shift_G[jnp.minimum(group_N, num_groups - 1)], num_places)
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        source_P = jnp.full(num_places, num_rows, jnp.int32).at[place_N].set(rows, mode="drop")
        return Grouping(source_P, place_N, sizes_G, block)

    def sorted(self, x_ND: jax.Array) -> jax.Array:
        """[P, D]; zeros where no row lies."""
        return _moved(x_ND, self.source_P, self.place_N)

    def unsorted(self, x_PD: jax.Array) -> jax.Array:
        """[N, D]; zeros for rows of no group."""
        return _moved(x_PD, self.place_N, self.source_P)

    def dot(self, x_PI: jax.Array, w_GIO: jax.Array) -> jax.Array:
        """[P, O]: each row times its group's matrix."""
        if current_platform() == "tpu":
            return jax.lax.ragged_dot(x_PI, w_GIO, self.sizes_G)
        num_blocks = x_PI.shape[0] // self.block
        ends_G = jnp.cumsum(self.sizes_G) // self.block
        # Blocks behind the last group hold zeros, whichever matrix they meet.
        group_B = jnp.minimum(jnp.searchsorted(ends_G, jnp.arange(num_blocks), side="right"), len(ends_G) - 1)
        out_BRO = _by_block(x_PI.reshape(num_blocks, self.block, -1), w_GIO, group_B)
        return out_BRO.reshape(x_PI.shape[0], -1)


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows of a block: large enough for full-speed products, small enough that filling up adds about a quarter."""
    wanted = num_rows // (4 * num_groups)
    return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, 1 << max(wanted, 1).bit_length() - 1))


# A gather's derivative would be a scatter, which is slow and, on GPUs, adds in any order. Here it is a gather, too.
@CustomVjp
def _moved(x_ND: jax.Array, source_P: jax.Array, place_N: jax.Array) -> jax.Array:
    del place_N
    return x_ND.at[source_P].get(mode="fill", fill_value=0)


def _moved_forward(x_ND, source_P, place_N):
    return _moved(x_ND, source_P, place_N), (source_P, place_N)


def _moved_backward(kept, d_out):
    source_P, place_N = kept
    return _moved(d_out, place_N, source_P), None, None


_moved.defvjp(_moved_forward, _moved_backward)


@CustomVjp
def _by_block(x_BRI: jax.Array, w_GIO: jax.Array, group_B: jax.Array) -> jax.Array:
    def one(_, block):
        x_RI, group = block
        return None, x_RI @ jax.lax.dynamic_index_in_dim(w_GIO, group, keepdims=False)

    return jax.lax.scan(one, None, (x_BRI, group_B))[1]


def _by_block_forward(x_BRI, w_GIO, group_B):
    return _by_block(x_BRI, w_GIO, group_B), (x_BRI, w_GIO, group_B)


def _by_block_backward(kept, d_out_BRO):
    x_BRI, w_GIO, group_B = kept

    def one(d_w_GIO, block):
        x_RI, d_out_RO, group = block
        d_x_RI = d_out_RO @ jax.lax.dynamic_index_in_dim(w_GIO, group, keepdims=False).T
        piece_IO = jnp.matmul(x_RI.T, d_out_RO, preferred_element_type=jnp.float32)
        return d_w_GIO.at[group].add(piece_IO), d_x_RI

    start = jnp.zeros(w_GIO.shape, jnp.float32)
    d_w_GIO, d_x_BRI = jax.lax.scan(one, start, (x_BRI, d_out_BRO, group_B))
    return d_x_BRI, d_w_GIO.astype(w_GIO.dtype), None


_by_block.defvjp(_by_block_forward, _by_block_backward)
