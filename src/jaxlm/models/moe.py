"""Mixture of experts (MoE): a router sends each token to a few MLPs. No token is dropped, unless a capacity is given.

Source: Shazeer et al. 2017 (arXiv:1701.06538), section 2. `jaxlm.models.routing` has the routers.

On a mesh, each device computes the experts (or slices of experts) that it holds (`jaxlm.models.experts.dispatch`).

Shapes: B batch, S position, K experts per token, P rows of this device's experts, E experts on this device, M mlp, D embed.
"""

import dataclasses
import math
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.ad_checkpoint import checkpoint_name

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, EMBED, EXPERTS, MLP, POSITION, VOCAB, axes_of
from jaxlm.core.parameters import SCALE, DeclaresParameters, Parameter
from jaxlm.core.products.matmul import dot
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.core.sharding import Layout
from jaxlm.models.activations import SwigluClamp, clamped, gated
from jaxlm.models.experts.dispatch import GATHER, Dispatched, ExpertSharding, dispatch
from jaxlm.models.experts.grouped_products import AUTO, choose_products, largest_block
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
        down_proj: mlp to embed, per expert. Its biases are weighted too.
        clamp: of gate and up, in place of the activation; None for none.
        expert_dispatch: how devices exchange tokens (`jaxlm.models.experts.dispatch`).
        expert_capacity: how many choices a device takes, relative to even loads; None for all.
        expert_products: how grouped products are computed, or `auto` (`jaxlm.models.experts.grouped_products`).
        expert_parts: number of parts of each device's tokens, which are sent and computed one after another.
    """

    router: Linear
    gate_proj: ExpertLinear
    up_proj: ExpertLinear
    down_proj: ExpertLinear
    routing: Routing
    activation: str = eqx.field(static=True)
    clamp: SwigluClamp | None = eqx.field(static=True, default=None)
    expert_dispatch: str = eqx.field(static=True, default=GATHER)
    expert_capacity: float | None = eqx.field(static=True, default=None)
    expert_products: str = eqx.field(static=True, default=AUTO)
    expert_parts: int = eqx.field(static=True, default=1)

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
        chosen_BSK, limit = routes.ids.array, self.expert_capacity
        if limit is not None or self.expert_dispatch != GATHER:  # padding needs no experts
            is_token_BS1 = segment_ids.rearrange((BATCH, POSITION)).array[..., None] != 0
            chosen_BSK = jnp.where(is_token_BS1, chosen_BSK, -1)
        out, dropped = self._apply_experts(x, chosen_BSK, routes.shares.array.astype(x.dtype))
        stats = routes.stats
        return out, stats if limit is None else dataclasses.replace(stats, dropped=hax.named(dropped, ()))

    def _apply_experts(
        self, x: NamedArray, chosen_BSK: jax.Array, share_BSK: jax.Array
    ) -> tuple[NamedArray, jax.Array]:
        """The chosen experts' outputs, weighted and summed, and how many choices were dropped."""
        x = x.rearrange((BATCH, POSITION, EMBED))
        layers = [layer.matrices() for layer in (self.gate_proj, self.up_proj, self.down_proj)]
        sharding = ExpertSharding.of(x, self.gate_proj.weight)

        def part(*tokens, gate, up, down):
            weight_EDM = gate.weight_EIO
            products, _ = choose_products(tokens[0].dtype, weight_EDM, weight_EDM.shape, self.expert_products)
            sent = dispatch(
                *tokens,
                num_experts=weight_EDM.shape[0],
                sharding=sharding,
                backend=self.expert_dispatch,
                capacity=self.expert_capacity,
                largest_block=largest_block(products),
            )
            out_BSD = sent.combine(self._local_experts(sent, gate, up, down.once(sharding)))
            return out_BSD, sent.num_dropped.astype(jnp.float32)

        def local(x_BSD, chosen_BSK, share_BSK, gate, up, down):
            tokens, layers = (x_BSD, chosen_BSK, share_BSK), {"gate": gate, "up": up, "down": down}
            num_parts = math.gcd(self.expert_parts, x_BSD.shape[0] * x_BSD.shape[1])
            if num_parts == 1:
                return part(*tokens, **layers)
            parts = zip(*(a.reshape(num_parts, 1, -1, a.shape[-1]) for a in tokens), strict=True)
            outs, dropped = zip(*(part(*one, **layers) for one in parts), strict=True)
            return jnp.concatenate(outs, axis=1).reshape(x_BSD.shape), sum(dropped)

        run = sharding.shard_map(local, layers)
        out, dropped = run(x.array, chosen_BSK, share_BSK, *layers)
        return hax.auto_sharded(NamedArray(out, x.axes)), dropped

    def _local_experts(self, sent: Dispatched, gate, up, down) -> jax.Array:
        """The outputs of this device's experts."""
        how = (sent.grouping, self.expert_products)
        # The gradients of `rows` are only read where there are rows.
        gate_PM, up_PM = (
            checkpoint_name(layer.dot(rows_PD, *how, any_gradient=True), EXPERT)
            for layer, rows_PD in zip((gate, up), sent.rows, strict=True)
        )
        hidden_PM = (
            gated(self.activation, gate_PM, up_PM) if self.clamp is None else clamped(self.clamp, gate_PM, up_PM)
        )
        # `combine` reads only rows of groups.
        out_PD = down.dot(sent.weighted(hidden_PM), *how, share_P1=sent.share_P1, any_rest=True)
        return checkpoint_name(out_PD, EXPERT)


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


def check_expert_sharding(model: Any, layout: Layout) -> None:
    """Raises `ConfigError` if stored weights of a model's experts cannot be cut as on a mesh. Called with shapes."""
    for layer in tree.modules(model, ExpertLinear) if layout.mesh.size > 1 else ():
        if isinstance(weight := layer.weight, StoredWeight):
            weight.check_cut([name for name in (EXPERTS, MLP) if mesh_axes(weight.resolve_axis(name), layout.compute)])


def num_active(model: Any) -> int:
    """Number of parameters that are active for one token: all except those of the experts it is not routed to."""
    inactive = 0
    for experts in tree.modules(model, Experts):
        layers = (experts.gate_proj, experts.up_proj, experts.down_proj)
        expert_size, num_experts = tree.num_parameters(layers), experts.gate_proj.weight.axis_size(EXPERTS)
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
