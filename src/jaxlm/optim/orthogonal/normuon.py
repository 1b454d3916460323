"""NorMuon: divides the rows of orthogonalized matrices, or their columns, by their usual size.

Source: Li et al. 2025, NorMuon: Making Muon more efficient and scalable (arXiv:2510.05491), algorithm 1. As in
github.com/karpathy/nanochat, a matrix with more columns than rows is divided by columns instead, the running mean has no
bias correction, and the result keeps the Frobenius norm of its input.
"""

from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray

from jaxlm.optim.matrices import MatrixView, matrices, replace_matrices

_SMALLEST = 1e-10  # of a mean square, and of a norm


class NorMuonState(NamedTuple):
    """State of NorMuon.

    Attributes:
        squares: path of a matrix -> running mean of the squares in each row (of a wide matrix: column), float32.
    """

    squares: dict[str, NamedArray]


def normalize_by_mean_squares(decay: float) -> optax.GradientTransformation:
    """Divides each row (of a wide matrix: each column) by the root of the running mean of its squares.

    Args:
        decay: decay rate of the running mean.
    """

    def init_fn(params: Any) -> Any:
        return NorMuonState({path: hax.zeros(_axes(view), jnp.float32) for path, view in matrices(params).items()})

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        scaled, squares = {}, {}
        for path, view in matrices(updates).items():
            matrix = view.matrix.astype(jnp.float32)
            within = -2 if _is_wide(view) else -1
            before = jnp.expand_dims(state.squares[path].array.reshape(_flat_shape(view)), within)
            result, after = _normalized(matrix, before, within, decay)
            scaled[path] = view.named(result.astype(view.weight.dtype))
            axes = _axes(view)
            squares[path] = hax.named(after.reshape(tuple(axis.size for axis in axes)), axes)
        return replace_matrices(updates, scaled), NorMuonState(squares)

    return optax.GradientTransformation(init_fn, update_fn)


def _normalized(matrix: jax.Array, before: jax.Array, within: int, decay: float) -> tuple[jax.Array, jax.Array]:
    """The scaled matrices, and the running means after them, with an axis of size 1 at `within`."""
    size = matrix.shape[within]
    square = jnp.mean(jnp.square(matrix), axis=within, keepdims=True)
    after = before + (1 - decay) * (square - before)
    scale = jax.lax.rsqrt(jnp.maximum(after, _SMALLEST))
    norm, scaled_norm = (
        jnp.sqrt(size * jnp.sum(x, axis=(-2, -1), keepdims=True)) for x in (square, square * jnp.square(scale))
    )
    return matrix * (scale * (norm / jnp.maximum(scaled_norm, _SMALLEST))), after


def _is_wide(view: MatrixView) -> bool:
    return hax.axis_size(view.outputs) < hax.axis_size(view.inputs)


def _axes(view: MatrixView) -> tuple[Axis, ...]:
    return (*view.stacked, *(view.inputs if _is_wide(view) else view.outputs))


def _flat_shape(view: MatrixView) -> tuple[int, ...]:
    return (*(axis.size for axis in view.stacked), hax.axis_size(view.inputs if _is_wide(view) else view.outputs))
