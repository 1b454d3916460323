"""Which parameters are matrices, and how each is laid out as one: what optimizers of matrices work on.

A linear map's weight has named axes in any order: {layers, heads, head_size, embed} is, for every layer, one matrix of
heads x head_size outputs and embed inputs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import VOCAB, axes_of
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
    return replace_matrices(params, {path: view.named(change(view.matrix)) for path, view in matrices(params).items()})


@dataclass(frozen=True)
class MatrixView:
    """The weight of a linear map as a matrix.

    Attributes:
        weight: with its own axes.
        stacked: axes that count matrices.
        outputs, inputs: axes that are its rows, and its columns.
    """

    weight: NamedArray
    stacked: tuple[Axis, ...]
    outputs: tuple[Axis, ...]
    inputs: tuple[Axis, ...]

    @property
    def matrix(self) -> jax.Array:
        """[.., out, in]."""
        return self.of(self.weight)

    def of(self, like: NamedArray) -> jax.Array:
        """An array with the weight's axes, as [.., out, in]."""
        stacked = (axis.size for axis in self.stacked)
        return like.rearrange(self._ordered).array.reshape((*stacked, size_of(self.outputs), size_of(self.inputs)))

    def named(self, matrix: jax.Array) -> NamedArray:
        """[.., out, in] with the weight's axes, in the weight's order."""
        array = matrix.reshape(tuple(axis.size for axis in self._ordered))
        return hax.named(array, self._ordered).rearrange(self.weight.axes)

    @property
    def _ordered(self) -> tuple[Axis, ...]:
        return (*self.stacked, *self.outputs, *self.inputs)


def matrices(params: Any) -> dict[str, MatrixView]:
    """By its path, the weight of every linear map that has an array in its place (and is not masked out, or frozen)."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_linear)
    return {
        f"{tree.dotted(path)}.weight": _view(node)
        for path, node in nodes
        if _is_linear(node) and tree.is_named(node.weight)
    }


def replace_matrices(params: Any, weights: Mapping[str, NamedArray]) -> Any:
    """The tree with other weights in the linear maps at these paths."""

    def replaced(path: Any, node: Any) -> Any:
        weight = weights.get(f"{tree.dotted(path)}.weight") if _is_linear(node) else None
        return node if weight is None else eqx.tree_at(lambda layer: layer.weight, node, weight)

    return jax.tree_util.tree_map_with_path(replaced, params, is_leaf=_is_linear)


def size_of(axes: tuple[Axis, ...]) -> int:
    """Of the one axis that these make together."""
    return math.prod(axis.size for axis in axes)


def _view(layer: Linear | ExpertLinear) -> MatrixView:
    outputs, inputs = axes_of(layer.Out), axes_of(layer.In)
    stacked = tuple(axis for axis in layer.weight.axes if axis not in (*outputs, *inputs))
    return MatrixView(layer.weight, stacked, outputs, inputs)


def _is_linear(node: Any) -> bool:
    return isinstance(node, (Linear, ExpertLinear))


def _is_hidden(layer: Linear | ExpertLinear) -> bool:
    return VOCAB not in {axis.name for axis in (*axes_of(layer.In), *axes_of(layer.Out))}
