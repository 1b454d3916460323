"""Orthogonalizes matrices with matrix products alone, each on one device as a whole, and normalizes their rows (NorMuon).

Orthogonalization moves all singular values towards 1; singular vectors stay. Its iterations are odd quintics of each
singular value s: a s + b s^3 + c s^5.

NorMuon divides the rows of orthogonalized matrices by their usual size. As in github.com/karpathy/nanochat, a matrix with
more columns than rows is divided by columns instead, the running mean has no bias correction, and the result keeps the
Frobenius norm of its input.

Matrices are divided among the devices: each device holds some of them whole, and no two that share a model do the same
work.

    matrices of one shape, sharded like parameters -> one stack -> all-to-all: whole matrices -> change -> all-to-all -> back

Devices along the mesh axis `replica` have a model each. They repeat this work, like the rest of the update, so that nothing
travels between them.

Source:
    `quintic`: Jordan et al. 2024 (kellerjordan.github.io/posts/muon).
    `polar_express`: Amsel et al. 2025, The Polar Express (arXiv:2505.16932), algorithm 1, with the coefficients of
    github.com/karpathy/nanochat (five iterations, safety factor 0.02).
    NorMuon: Li et al. 2025, NorMuon: Making Muon more efficient and scalable (arXiv:2510.05491), algorithm 1.
    Division among devices: that of the optimizer's work in ZeRO, Rajbhandari et al. 2020 (arXiv:1910.02054), section 5.1,
    by matrices instead of elements, because the orthogonalization of a part of a matrix is not part of its
    orthogonalization.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.core.axes import REPLICA, axis_names
from jaxlm.core.sharding import Layout, at_rest, current_layout
from jaxlm.optim.matrices import MatrixView, matrices, replace_matrices

Quintic = tuple[float, float, float]

# Steep at 0, near 1 elsewhere: singular values end between about 0.7 and 1.2.
QUINTIC: Sequence[Quintic] = ((3.4445, -4.7750, 2.0315),)
# Each is the best one for the interval that the one before it leaves: they end between about 0.86 and 1.14.
POLAR_EXPRESS: Sequence[Quintic] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
COEFFICIENTS = {"quintic": QUINTIC, "polar_express": POLAR_EXPRESS}
_SMALLEST_NORM = 1e-6


def newton_schulz(
    matrix: jax.Array,
    num_steps: int,
    epsilon: float,
    coefficients: Sequence[Quintic] = QUINTIC,
    *,
    norm_factor: float = 1.0,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Approximately orthogonalizes each matrix of [.., rows, columns].

    Args:
        num_steps: number of iterations. Those beyond the coefficients use the last ones.
        epsilon: added to the norm of a matrix before dividing by it.
        norm_factor: a matrix is divided by this times its norm.
        dtype: dtype of the iterations and of the result; the norm is then computed in float32. None keeps the matrix's.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix  # use the smaller of the two Gram matrices
    if dtype is not None:
        x = x.astype(jnp.float32)
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) * norm_factor + epsilon)
    if dtype is not None:
        x = x.astype(dtype)
    for number in range(num_steps):
        a, b, c = coefficients[min(number, len(coefficients) - 1)]
        gram = x @ x.mT
        # A factor of a bfloat16 array would be rounded to bfloat16 itself, by up to 0.4 %: in every iteration the same way.
        square = (c * _wide(gram)).astype(x.dtype) @ gram
        pull = (b * _wide(gram) + _wide(square)).astype(x.dtype)
        x = (a * _wide(x) + _wide(pull @ x)).astype(x.dtype)
    return x.mT if tall else x


def _wide(matrix: jax.Array) -> jax.Array:
    return matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))


def equal_rows(matrix: jax.Array) -> jax.Array:
    """Scales the rows of each matrix [.., rows, columns] to the same norm; the Frobenius norm does not change.

    Source: MuonEq (arXiv:2603.28254), with rows as outputs: the singular values are then closer to each other.
    """
    wide = matrix.astype(jnp.float32)
    whole = jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True)
    rows = jnp.linalg.norm(wide, axis=-1, keepdims=True)
    return (wide * (whole / matrix.shape[-2] ** 0.5 / jnp.maximum(rows, _SMALLEST_NORM))).astype(matrix.dtype)


def orthogonal_norm(matrix: jax.Array) -> jax.Array:
    """Scales each matrix [.., rows, columns] to the Frobenius norm of an exactly orthogonal one, sqrt(min(rows, columns)).

    Source: Muon+ (arXiv:2602.21545). The iterations leave it smaller or larger, from matrix to matrix.
    """
    norm = jnp.linalg.norm(matrix.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    return matrix * (min(matrix.shape[-2:]) ** 0.5 / jnp.maximum(norm, _SMALLEST_NORM)).astype(matrix.dtype)


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
            flat = (*(axis.size for axis in view.stacked), -1)
            before = jnp.expand_dims(state.squares[path].array.reshape(flat), within)
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


MeshAxes = tuple[str, ...]


def map_sharded_matrices(
    change: Callable[[jax.Array], jax.Array], views: Mapping[str, MatrixView], active: jax.Array | None = None
) -> dict[str, NamedArray]:
    """Applies `change` to every matrix, as [.., rows, columns]. Each device changes some of them.

    Args:
        change: treats each matrix by itself, and the transpose of a matrix like the matrix. It may return another dtype.
        active: bool; if False, the matrices move, but none is changed, and the result is the matrices. None is True.
    """
    layout = current_layout()
    if layout is None or layout.mesh.size == 1:
        return {path: view.named(_changed_if(active, change, view.matrix)) for path, view in views.items()}
    groups: dict[tuple, list[_Stack]] = {}
    for path, view in views.items():
        stack = _stack_of(path, view, layout)
        groups.setdefault(stack.key, []).append(stack)
    changed = [pair for stacks in groups.values() for pair in _changed(change, stacks, layout, active)]
    return {path: at_rest(array, layout) for path, array in changed}


@dataclass(frozen=True)
class _Stack:
    """The matrices of one parameter as an array [outer, inner, short, long].

    Attributes:
        matrices: the array.
        spec: mesh axes that shard each dimension of a parameter like this. `inner` is never sharded.
        restore: turns an array [outer, inner, short, long] into the parameter's form.
    """

    path: str
    matrices: jax.Array
    spec: tuple[MeshAxes, MeshAxes, MeshAxes, MeshAxes]
    restore: Callable[[jax.Array], NamedArray]

    @property
    def key(self) -> tuple:
        """Stacks with the same key can be joined along `inner`."""
        outer, _, short, long = self.matrices.shape
        return outer, short, long, self.matrices.dtype, self.spec[0]


def _stack_of(path: str, view: MatrixView, layout: Layout) -> _Stack:
    sharding = layout.parameter_sharding(view.weight.axes)
    names = {a.name: axis_names(e) for a, e in zip(view.weight.axes, sharding.spec, strict=True)}
    outer = tuple(axis for axis in view.stacked if names[axis.name])
    inner = tuple(axis for axis in view.stacked if not names[axis.name])
    ordered = MatrixView(view.weight, (*outer, *inner), view.outputs, view.inputs)
    rows, columns = (_merged(side, names) for side in (view.outputs, view.inputs))
    shape = tuple(math.prod(axis.size for axis in axes) for axes in (outer, inner, view.outputs, view.inputs))
    # Square matrices that are sharded along different sides are turned, so that all moves are the same.
    turned = shape[2] > shape[3] or (shape[2] == shape[3] and rows > columns)
    matrices = ordered.matrix.reshape(shape)

    def restore(array: jax.Array) -> NamedArray:
        whole = array.mT if turned else array
        return ordered.named(whole)

    sides = (columns, rows) if turned else (rows, columns)
    return _Stack(path, matrices.mT if turned else matrices, (_merged(outer, names), (), *sides), restore)


def _merged(axes: Sequence[Axis], names: Mapping[str, MeshAxes]) -> MeshAxes:
    """The mesh axes that shard several axes as one: those of the first."""
    return names[axes[0].name] if axes else ()


def _changed_if(active: jax.Array | None, change: Callable[[jax.Array], jax.Array], array: jax.Array) -> jax.Array:
    if active is None:
        return change(array)
    dtype = jax.eval_shape(change, array).dtype
    return jax.lax.cond(active, change, lambda same: same.astype(dtype), array)


def _changed(
    change: Callable[[jax.Array], jax.Array], stacks: Sequence[_Stack], layout: Layout, active: jax.Array | None
) -> Iterator[tuple[str, NamedArray]]:
    """Moves the joined matrices to the devices that change them, and back."""
    specs = _moves(stacks[0].spec, layout)
    moves = [NamedSharding(layout.mesh, PartitionSpec(*(names or None for names in spec))) for spec in specs]
    joined = [jax.lax.with_sharding_constraint(stack.matrices, moves[0]) for stack in stacks]
    array = jnp.concatenate(joined, axis=1) if len(joined) > 1 else joined[0]
    array = _padded(array, math.prod(layout.mesh.shape[name] for name in specs[-1][1]))
    for move in moves:
        array = jax.lax.with_sharding_constraint(array, move)
    if active is None:
        array = change(array)
    else:
        # XLA may gather what a conditional around sharded arrays returns, so each device decides for those that it has.
        local = lambda own, flag: _changed_if(flag, change, own)  # noqa: E731
        spec = moves[-1].spec
        run = jax.shard_map(local, mesh=layout.mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)
        array = run(array, active)
    for move in reversed(moves):
        array = jax.lax.with_sharding_constraint(array, move)
    start = 0
    for stack in stacks:
        end = start + stack.matrices.shape[1]
        yield stack.path, stack.restore(array[:, start:end])
        start = end


def _moves(spec: tuple[MeshAxes, MeshAxes, MeshAxes, MeshAxes], layout: Layout) -> list[tuple[MeshAxes, ...]]:
    """Specs from the parameter's to that of whole matrices: each mesh axis moves alone, which is one all-to-all."""
    outer, _, short, long = spec
    used = (REPLICA, *outer, *short, *long)
    unused = [name for name, size in layout.mesh.shape.items() if size > 1 and name not in used]
    specs: list[tuple[MeshAxes, ...]] = [(outer, (), short, long)]
    while short or long:
        inner = specs[-1][1]
        if long:
            inner, long = (*inner, long[-1]), long[:-1]
        else:
            inner, short = (*inner, short[-1]), short[:-1]
        specs.append((outer, inner, short, long))
    if unused:
        specs.append((outer, (*specs[-1][1], *unused), (), ()))
    return specs


def _padded(array: jax.Array, multiple: int) -> jax.Array:
    """Appends matrices of ones along `inner`, so that all devices have the same number."""
    missing = -array.shape[1] % multiple
    return jnp.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0)), constant_values=1) if missing else array
