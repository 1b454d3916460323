"""More layers for a body, as a stack of their own before or after those that it has.

The new stack has its own scan and its own paths, so that it may be trained, adapted and stored in another way. A body
remembers how it has grown as it remembers splits, so that a trained model is joined into one stack again (`whole`).
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.models.base import ModelConfig
from jaxlm.models.norms import LayerNorm, Norm, RMSNorm
from jaxlm.models.stacks import Body, Stack, Stacks, concatenated, taken_layers

Place = Literal["append", "prepend"]
M = TypeVar("M")
E = TypeVar("E", bound=eqx.Module)


def repeated_layers(num_layers: int, added: int, place: Place) -> tuple[tuple[int, ...], range]:
    """For each layer of a larger model, the number of the layer that it is like if the layers repeat; and the new layers.

    Layer i of the larger model is like layer i mod `num_layers`, counted from the first layer of the smaller one (G_stack).
    """
    old = range(num_layers)
    if place == "append":
        return (*old, *(layer % num_layers for layer in range(added))), range(num_layers, num_layers + added)
    return (*(layer % num_layers for layer in range(-added, 0)), *old), range(added)


def grown_body(old: Body, config: ModelConfig, Vocab: Axis, added: range, key: jax.Array | None) -> Stacks:
    """The body with new layers at one end, as a model of this config initializes them. Leaves of `old` may be missing (None).

    Args:
        config: of the larger model.
        added: the numbers of the new layers, the first or the last ones.
        key: None leaves the leaves of the new layers out.

    Raises:
        ConfigError: the layers are of several structures.
    """
    if len({stack.structure for stack in old.stacks}) > 1:
        raise ConfigError(
            "the layers of this model are of several structures, such as layers with and without experts, so that new ones"
            " have no place in its stacks. Only models whose layers all have the same parameters can grow. Remove the"
            " surgery, or start from such a model"
        )
    whole: Any = lambda: config.build(Vocab, key=jax.random.key(0) if key is None else key)  # noqa: E731
    if key is None:
        shapes = jax.eval_shape(lambda: whole().body.with_layers(added))
        new = jax.tree.map(lambda _: None, shapes, is_leaf=tree.is_named)
    else:
        new = whole().body.with_layers(added)
    assert isinstance(new, Stack), "one structure has one stack"
    generation = 1 + max(stack.generation for stack in old.stacks)
    new = dataclasses.replace(new, structure=old.stacks[0].structure, generation=generation, final_norm=None)
    count, stack_of_layer = len(old.stacks), old.stack_of_layer
    if added.start == 0:
        parts = (new, *old.stacks)
        stack_of_layer = (*(0 for _ in added), *(1 + number for number in stack_of_layer))
        split = ((0, 1), *((1 + number,) for number in range(1, count)))
    else:
        parts, stack_of_layer = (*old.stacks, new), (*stack_of_layer, *(count for _ in added))
        split = (*((number,) for number in range(count - 1)), (count - 1, count))
    return dataclasses.replace(Stacks.of(parts, stack_of_layer, old.last_norm), splits=(*old.splits, split))


def whole(model: M) -> M:
    """The model with all stacks joined that its layers were split into or have grown. Those that differ in more than their
    number of layers, such as by adapters, stay apart."""

    def joined(body: Stacks) -> Body:
        result: Body = body
        while isinstance(result, Stacks) and result.splits and (after := result.unsplit()) is not result:
            result = after
        return dataclasses.replace(result, generation=0) if isinstance(result, Stack) else result

    is_stacks = lambda node: isinstance(node, Stacks)  # noqa: E731
    return jax.tree.map(lambda node: joined(node) if is_stacks(node) else node, model, is_leaf=is_stacks)


def with_copied_layers(new: Stack, old: Body, sources: Sequence[int]) -> Stack:
    """The stack with the values of these layers of a body, which must have the same parameters.

    Raises:
        ConfigError: they have others: adapters, or stored weights.
    """
    by_path = [dict(tree.leaves(stack.layers.stacked)) for stack in old.stacks]

    def copied(path: str, leaf: Any) -> Any:
        if missing := [number for number, leaves in enumerate(by_path) if path not in leaves]:
            stored = tree.modules(old.stacks[missing[0]].layers.stacked, StoredWeight)
            forms = " and ".join(dict.fromkeys(weight.form for weight in stored))
            why = "it has adapters there. Merge the adapters before (surgery lora: existing: merge)"
            if stored:
                why = f"its weights are stored as {forms}. Grow before they are stored (surgery quantize)"
            raise ConfigError(f"stack {missing[0]} of the model has no plain parameter {path}, because {why}")
        return taken_layers(concatenated([leaves[path] for leaves in by_path]), np.asarray(sources)).astype(leaf.dtype)

    return dataclasses.replace(
        new, layers=dataclasses.replace(new.layers, stacked=tree.map_leaves(copied, new.layers.stacked))
    )


class StartsAsIdentity(eqx.Module):
    """A block that can be made to return its input, with gradients that lead away from there."""

    @abc.abstractmethod
    def as_identity(self: M) -> M:
        """The block with zeros where it adds to the residual stream. Its arrays may have an axis of layers.

        Raises:
            ConfigError: it has no such place.
        """


def zeroed(module: M) -> M:
    """The module with zeros in place of its floating-point arrays."""
    zero = lambda leaf: NamedArray(jnp.zeros_like(leaf.array), leaf.axes) if tree.is_inexact(leaf) else leaf  # noqa: E731
    return jax.tree.map(zero, module, is_leaf=tree.is_named)


def without_output(module: E, projection: str, post_norm: Norm | None) -> tuple[E, Norm | None]:
    """A residual branch that adds nothing: attention or an MLP, of which `projection` is the last layer, and the norm behind
    it. Only one of the two is changed."""
    if post_norm is not None:
        return module, norm_of_zero(post_norm)
    return dataclasses.replace(module, **{projection: zeroed(getattr(module, projection))}), None


def norm_of_zero(norm: Norm) -> Norm:
    """A norm that returns zero for every input: a residual branch behind it starts to train with its gain (as the last norm
    of a branch in Goyal et al. 2017, arXiv:1706.02677, section 5.1).

    A zero before the norm would not do: it divides by the size of its input, so that the first update of any size would
    already change its output by 1.
    """
    match norm:
        case RMSNorm():
            return dataclasses.replace(norm, weight=zeroed(norm.weight) - norm.offset)
        case LayerNorm():
            return dataclasses.replace(norm, weight=zeroed(norm.weight), bias=zeroed(norm.bias))
    raise ConfigError(
        "a norm without weights follows attention or the MLP, which gives their output the same size whatever it is, so that"
        " a new layer cannot start as the identity"
    )
