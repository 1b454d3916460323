"""Which parameters are matrices, and how each is laid out as one: what optimizers of matrices work on.

A linear map's weight has named axes in any order: {layers, heads, head_size, embed} is, for every layer, one matrix of
heads x head_size outputs and embed inputs.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import VOCAB
from jaxlm.models.linear import ExpertLinear, Linear


def matrix_paths(params: Any) -> frozenset[str]:
    """The paths of all hidden matrices: weights of linear maps that neither begin nor end at the vocabulary."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_linear)
    prefixes = {tree.dotted(path) for path, node in nodes if _is_linear(node) and _is_hidden(node)}
    weights = {f"{prefix}.weight" for prefix in prefixes}
    return frozenset(path for path, _ in tree.leaves(params) if path in weights)


def map_matrices(change: Callable[[jax.Array], jax.Array], params: Any) -> Any:
    """The tree with `change` applied to the weight of every linear map in it, as an array [.., out, in].

    What has no array in its place (masked out, or frozen) stays as it is.
    """

    def changed(node: Any) -> Any:
        if not (_is_linear(node) and tree.is_named(node.weight)):
            return node
        return eqx.tree_at(lambda layer: layer.weight, node, _in_layout(change, node))

    return jax.tree.map(changed, params, is_leaf=_is_linear)


def _in_layout(change: Callable[[jax.Array], jax.Array], layer: Linear | ExpertLinear) -> NamedArray:
    outputs, inputs = _axes(layer.Out), _axes(layer.In)
    stacked = tuple(axis for axis in layer.weight.axes if axis not in (*outputs, *inputs))
    ordered = layer.weight.rearrange((*stacked, *outputs, *inputs))
    shape = (*(axis.size for axis in stacked), _size(outputs), _size(inputs))
    result = change(ordered.array.reshape(shape)).reshape(ordered.array.shape)
    return hax.named(result, ordered.axes).rearrange(layer.weight.axes)


def _is_linear(node: Any) -> bool:
    return isinstance(node, (Linear, ExpertLinear))


def _is_hidden(layer: Linear | ExpertLinear) -> bool:
    return VOCAB not in {axis.name for axis in (*_axes(layer.In), *_axes(layer.Out))}


def _axes(spec: Any) -> tuple[Axis, ...]:
    return (spec,) if isinstance(spec, Axis) else tuple(spec)


def _size(axes: tuple[Axis, ...]) -> int:
    return math.prod(axis.size for axis in axes)
