"""Finds the parameters that are matrices, and reshapes each of them to a matrix, for optimizers such as Muon.

The weight of a linear layer has named axes in any order: {layers, heads, head_size, embed} is one matrix per layer, with
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
    """The paths of all hidden matrices: weights of linear layers without a vocabulary axis."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_linear)
    prefixes = {tree.dotted(path) for path, node in nodes if _is_linear(node) and _is_hidden(node)}
    weights = {f"{prefix}.weight" for prefix in prefixes}
    return frozenset(path for path, _ in tree.leaves(params) if path in weights)


def map_matrices(change: Callable[[jax.Array], jax.Array], params: Any) -> Any:
    """Applies `change` to the weight of every linear layer, as an array [.., out, in].

    Layers without an array (masked or frozen) are unchanged.
    """
    return replace_matrices(params, {path: view.named(change(view.matrix)) for path, view in matrices(params).items()})


@dataclass(frozen=True)
class MatrixView:
    """The weight of a linear layer viewed as a matrix.

    Attributes:
        weight: the weight with its named axes.
        stacked: axes that index separate matrices, such as layers or experts.
        outputs, inputs: axes that form the rows and the columns.
    """

    weight: NamedArray
    stacked: tuple[Axis, ...]
    outputs: tuple[Axis, ...]
    inputs: tuple[Axis, ...]

    @property
    def matrix(self) -> jax.Array:
        """The weight as [.., out, in]."""
        return self.of(self.weight)

    def of(self, like: NamedArray) -> jax.Array:
        """Reshapes an array with the weight's axes to [.., out, in]."""
        stacked = (axis.size for axis in self.stacked)
        return like.rearrange(self._ordered).array.reshape((*stacked, size_of(self.outputs), size_of(self.inputs)))

    def named(self, matrix: jax.Array) -> NamedArray:
        """Reshapes [.., out, in] to the weight's axes, in the weight's order."""
        array = matrix.reshape(tuple(axis.size for axis in self._ordered))
        return hax.named(array, self._ordered).rearrange(self.weight.axes)

    @property
    def _ordered(self) -> tuple[Axis, ...]:
        return (*self.stacked, *self.outputs, *self.inputs)


def matrices(params: Any) -> dict[str, MatrixView]:
    """The weight of every linear layer by path, without those that have no array (masked or frozen)."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_linear)
    return {
        f"{tree.dotted(path)}.weight": _view(node)
        for path, node in nodes
        if _is_linear(node) and tree.is_named(node.weight)
    }


def replace_matrices(params: Any, weights: Mapping[str, NamedArray]) -> Any:
    """Replaces the weights of the linear layers at the given paths."""

    def replaced(path: Any, node: Any) -> Any:
        weight = weights.get(f"{tree.dotted(path)}.weight") if _is_linear(node) else None
        return node if weight is None else eqx.tree_at(lambda layer: layer.weight, node, weight)

    return jax.tree_util.tree_map_with_path(replaced, params, is_leaf=_is_linear)


def size_of(axes: tuple[Axis, ...]) -> int:
    """The product of the axis sizes."""
    return math.prod(axis.size for axis in axes)


def _view(layer: Linear | ExpertLinear) -> MatrixView:
    assert isinstance(layer.weight, NamedArray)
    outputs, inputs = axes_of(layer.Out), axes_of(layer.In)
    stacked = tuple(axis for axis in layer.weight.axes if axis not in (*outputs, *inputs))
    return MatrixView(layer.weight, stacked, outputs, inputs)


def _is_linear(node: Any) -> bool:
    return isinstance(node, (Linear, ExpertLinear))


def _is_hidden(layer: Linear | ExpertLinear) -> bool:
    return VOCAB not in {axis.name for axis in (*axes_of(layer.In), *axes_of(layer.Out))}
