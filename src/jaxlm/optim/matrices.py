"""Finds the parameters that are matrices, reshapes them, and combines an update rule for matrices with Adam for the others.

Optimizers such as Muon need this. The weight of a linear layer has named axes in any order: {layers, heads, head_size,
embed} is one matrix per layer, with heads x head_size outputs and embed inputs. Modules say which parameters are matrices
(`core/parameters.py`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import optax
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import EMBED, POSITION, VOCAB
from jaxlm.core.parameters import MatrixAxes, described
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, add_weight_decay, clip_by_norm, scale_by_learning_rate

# A matrix with one of these axes embeds tokens or positions, or is the output head.
_NOT_HIDDEN = {VOCAB, POSITION}


def matrix_paths(params: Any) -> frozenset[str]:
    """The paths of all hidden matrices: those without a vocabulary or position axis."""
    return frozenset(
        path
        for path, axes in _axes_by_path(params).items()
        if _NOT_HIDDEN.isdisjoint(axis.name for axis in (*axes.outputs, *axes.inputs))
    )


def map_matrices(change: Callable[[jax.Array], jax.Array], params: Any) -> Any:
    """Applies `change` to every matrix, as an array [.., out, in].

    Other leaves, and layers without an array (masked or frozen), are unchanged.
    """
    return replace_matrices(params, {path: view.named(change(view.matrix)) for path, view in matrices(params).items()})


@dataclass(frozen=True)
class MatrixView:
    """A parameter viewed as a matrix.

    Attributes:
        weight: the parameter with its named axes.
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
        return like.rearrange(self._ordered).array.reshape(
            (*stacked, hax.axis_size(self.outputs), hax.axis_size(self.inputs))
        )

    def named(self, matrix: jax.Array) -> NamedArray:
        """Reshapes [.., out, in] to the weight's axes, in the weight's order."""
        array = matrix.reshape(tuple(axis.size for axis in self._ordered))
        return hax.named(array, self._ordered).rearrange(self.weight.axes)

    @property
    def _ordered(self) -> tuple[Axis, ...]:
        return (*self.stacked, *self.outputs, *self.inputs)


def matrices(params: Any) -> dict[str, MatrixView]:
    """Every matrix by path, without those whose layer has no array (masked or frozen)."""
    axes = _axes_by_path(params)
    return {path: _view(leaf, axes[path]) for path, leaf in tree.leaves(params) if path in axes}


def replace_matrices(params: Any, weights: Mapping[str, NamedArray]) -> Any:
    """Replaces the matrices at the given paths."""

    def replaced(path: str, leaf: Any) -> Any:
        weight = weights.get(path)
        return leaf if weight is None else weight if tree.is_named(leaf) else weight.array

    return tree.map_leaves(replaced, params)


def square_axes(stacked: tuple[Axis, ...], side: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Axes of a square matrix for one side of each stacked matrix: {stacked .., the side's axes .., basis}.

    If FSDP does not shard the side itself, it shards the basis, so that no square matrix is replicated.
    """
    basis = "basis" if EMBED in {axis.name for axis in side} else EMBED
    return (*stacked, *side, Axis(basis, hax.axis_size(side)))


def with_adam_fallback(
    config: OptimizerConfig,
    groups: Sequence[ParameterGroup],
    num_steps: int,
    matrices: tuple[str, optax.GradientTransformation],
    adam: optax.GradientTransformation,
    *,
    adam_lr: float,
    max_grad_norm: float | None,
    decay: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Clips the global norm, computes each parameter's direction, adds weight decay, and scales by the learning rate.

    Args:
        config: has the learning rate of matrices, and the schedule of both learning rates.
        matrices: name in the optimizer state and transformation for the groups with `as_matrices`.
        adam: transformation for all other groups.
        adam_lr: peak learning rate of all other groups.
        decay: adds the weight decay to the directions of both; None adds that of `config`.
    """
    name, direction = matrices
    paths = {path for group in groups if group.as_matrices for path in group.paths}

    def labels(params: Any) -> Any:
        return tree.map_leaves(lambda path, _: name if path in paths else "adam", params)

    directions: Any = {name: direction, "adam": adam}
    rates: Any = {
        name: scale_by_learning_rate(config.schedule(num_steps)),
        "adam": scale_by_learning_rate(dataclasses.replace(config, learning_rate=adam_lr).schedule(num_steps)),
    }
    return optax.with_extra_args_support(
        optax.chain(
            clip_by_norm(max_grad_norm),
            optax.partition(directions, labels),
            add_weight_decay(config, groups) if decay is None else decay,
            optax.partition(rates, labels),
        )
    )


def _view(leaf: Any, axes: MatrixAxes) -> MatrixView:
    weight = leaf if tree.is_named(leaf) else hax.named(leaf, (*axes.outputs, *axes.inputs))
    stacked = tuple(axis for axis in weight.axes if axis not in (*axes.outputs, *axes.inputs))
    return MatrixView(weight, stacked, axes.outputs, axes.inputs)


def _axes_by_path(params: Any) -> dict[str, MatrixAxes]:
    return {path: one.matrix for path, one in described(params).items() if one.matrix is not None}
