"""Unstacked layers, for decoding on one CPU device.

XLA on CPUs copies a slice of an array before it reads it. With stacked layers, that copies every weight and every cache
slot for each token, which takes longer than reading them. Separate arrays per layer are read and updated in place.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, LAYERS
from jaxlm.core.sharding import current_layout, current_platform
from jaxlm.core.tree import is_named
from jaxlm.models.attention.choose import AUTO
from jaxlm.models.base import Hidden, Inputs, LanguageModel
from jaxlm.models.inference.cache import DecodingCache, UnstackedCache, extend_slots, mask_over_cache
from jaxlm.models.linear import Linear, MatrixLinear
from jaxlm.models.mixers.base import LayerCache, Taken
from jaxlm.models.norms import Norm
from jaxlm.models.scan import shortest_period
from jaxlm.models.stacks import Block, Body, HeterogeneousBody, LayerKind, layer_contexts

T = TypeVar("T")


class UnstackedBody(eqx.Module):
    """A `Body` with unstacked layers, for decoding with an `UnstackedCache` only.

    Attributes:
        stack_of_layer: the number of each layer's stack in the cache.
    """

    layers: tuple[Block, ...]
    final_norm: Norm
    kinds: tuple[LayerKind, ...] = eqx.field(static=True)
    stack_of_layer: tuple[int, ...] = eqx.field(static=True)

    def __call__(
        self,
        x: NamedArray,
        inputs: Inputs,
        cache: UnstackedCache,
        key: None,
        taps: tuple[()] = (),
        *,
        layer_inputs: NamedArray | None = None,
    ) -> Hidden:
        """Maps embedded tokens {batch, position, embed} to final hidden states. Each layer updates its cache before it
        reads it, unless later layers read that too.

        Args:
            layer_inputs: as of a `Body`.
        """
        contexts = layer_contexts(self.kinds, inputs, mask_over_cache(cache, inputs), AUTO, cache.length)
        stacks: list[list[Any]] = [[] for _ in cache.stacks]
        taken: dict[str | None, Taken] = {}
        for number, (block, stack) in enumerate(zip(self.layers, self.stack_of_layer, strict=True)):
            layer_cache, kind = cache.stacks[stack][len(stacks[stack])], self.kinds[number % len(self.kinds)]
            own = None if layer_inputs is None else layer_inputs[LAYERS, number]
            context = contexts[number % len(contexts)]
            context = dataclasses.replace(context, taken=taken.get(kind.takes), layer_input=own)
            x, extended, _ = block(x, context, layer_cache, index=hax.named(number, ()), key=key)
            if kind.gives is not None:
                new, extended = extended, layer_cache.extended(extended, cache.length)
                taken[kind.gives] = Taken(new, extended)
            stacks[stack].append(extended)
        return Hidden(self.final_norm(x), UnstackedCache(tuple(map(tuple, stacks)), **extend_slots(cache, inputs)))


@dataclass(frozen=True)
class Generator:
    """A model prepared for generation. Create it once and reuse it, because it may hold a copy of the model.

    Attributes:
        model: used for prefill.
        step_model: used for decoding token by token: the model itself, or a copy with unstacked layers.
    """

    model: LanguageModel
    step_model: Any

    @staticmethod
    def of(model: LanguageModel) -> "Generator":
        """Prepares a model for the current devices. If there is a layout, call this inside `layout.use()`."""
        layout = current_layout()
        # A mesh gathers layer by layer, in a loop.
        unstacks = current_platform() == "cpu" and (layout is None or layout.mesh.size == 1)
        return Generator(model, _unstacked_copy(model) if unstacks else model)

    def in_step_layout(self, cache: T) -> T:
        """Converts every cache in a pytree, as written by `model`, to the layout that `step_model` reads."""
        return cache if self.step_model is self.model else _unstacked_copy(cache)


def unstack(tree: T) -> T:
    """A copy in which every body and `DecodingCache` has separate arrays per layer."""
    return jax.tree.map(
        _unstack_node, tree, is_leaf=lambda node: isinstance(node, Body | HeterogeneousBody | DecodingCache)
    )


_unstacked_copy = jax.jit(unstack)


def stack(cache: UnstackedCache) -> DecodingCache:
    """The inverse of `unstack` for a cache, as a copy."""
    Batch = cache.positions.resolve_axis(BATCH)

    def joined(*layers: NamedArray) -> NamedArray:
        array = jnp.stack([layer.array for layer in layers])
        return NamedArray(array, (Axis(LAYERS, len(layers)), *layers[0].axes))

    stacks = (jax.tree.map(joined, *layers, is_leaf=is_named).unflattened(Batch) for layers in cache.stacks)
    return DecodingCache(tuple(stacks), cache.positions, cache.segment_ids, cache.length, tokens=cache.tokens)


def _unstack_node(node: Any) -> Any:
    if isinstance(node, HeterogeneousBody):
        return node.unstacked()
    if isinstance(node, Body):
        stacks = [iter(stack.layers.unstacked()) for stack in node.stacks]
        blocks = tuple(next(stacks[number]) for number in node.stack_of_layer)
        is_linear = lambda part: isinstance(part, Linear)  # noqa: E731
        blocks = jax.tree.map(
            lambda part: MatrixLinear.of(part) if is_linear(part) else part, blocks, is_leaf=is_linear
        )
        kinds = shortest_period(node.kinds_by_layer)
        return UnstackedBody(blocks, node.last_norm, kinds, node.stack_of_layer)
    if isinstance(node, DecodingCache):
        stacks = tuple(_layers(one) for one in node.stacks)
        return UnstackedCache(stacks, node.positions, node.segment_ids, node.length, node.tokens)
    return node


def _layers(stacked: LayerCache) -> tuple[LayerCache, ...]:
    flat = stacked.flattened()
    count = jax.tree.leaves(flat, is_leaf=is_named)[0].axis_size(LAYERS)
    return tuple(jax.tree.map(lambda x, i=i: x[LAYERS, i], flat, is_leaf=is_named) for i in range(count))
