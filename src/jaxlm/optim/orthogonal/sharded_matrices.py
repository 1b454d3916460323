"""Divides matrices among the devices: each device holds some of them whole, and no two that share a model do the same work.

    matrices of one shape, sharded like parameters -> one stack -> all-to-all: whole matrices -> change -> all-to-all -> back

Devices along the mesh axis `replica` have a model each. They repeat this work, like the rest of the update, so that nothing
travels between them.

Source: the division of the optimizer's work in ZeRO, Rajbhandari et al. 2020 (arXiv:1910.02054), section 5.1, by matrices
instead of elements, because the orthogonalization of a part of a matrix is not part of its orthogonalization.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.core.axes import REPLICA, axis_names
from jaxlm.core.sharding import Layout, at_rest, current_layout
from jaxlm.optim.matrices import MatrixView

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
    """With matrices of ones at the end of `inner`, so that every device has equally many."""
    missing = -array.shape[1] % multiple
    return jnp.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0)), constant_values=1) if missing else array
