"""Where arrays live: a mesh and the two mappings from logical axes onto it.

Parameters and optimizer state rest under the *parameter* mapping (FSDP: `embed` over `data`); computation runs under the
*compute* mapping (`batch` over `replica` and `data`, `mlp` and `heads` over `model`). A model asks `for_compute` for each
unit's parameters where it uses them, inside the scan over layers, so that only one layer is ever gathered at a time.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
from haliax.partitioning import ResourceMapping
from jax.custom_derivatives import linear_call
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.core.custom_vjp import is_twice_differentiable

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """A device mesh with the parameter and the compute mapping.

    Attributes:
        mesh: axes replica, data and model, and those of `trainer.mesh`.
        parameter: logical axis -> mesh axis (or axes) for parameters, gradients and optimizer state at rest.
        compute: logical axis -> mesh axis (or axes) for activations.
    """

    mesh: Mesh
    parameter: ResourceMapping
    compute: ResourceMapping

    @contextlib.contextmanager
    def use(self) -> Iterator["Layout"]:
        """Makes this the current layout for `for_compute`, haliax and jit inside the block."""
        token = _current.set(self)
        try:
            with jax.set_mesh(self.mesh), hax.axis_mapping(self.compute):
                yield self
        finally:
            _current.reset(token)

    @property
    def device(self) -> Any:
        """One of the mesh's devices, which are all alike and need not be there."""
        return self.mesh.devices.flat[0]

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`: of the mesh's devices."""
        return "gpu" if self.device.platform in ("cuda", "rocm") else self.device.platform

    def parameter_sharding(self, axes: tuple[hax.Axis, ...]) -> NamedSharding:
        """The resting place of a parameter with these axes, or of what an optimizer keeps about one.

        What does not divide lies whole on every device. Only of optimizers: the plan has looked at the parameters.
        """
        spec = spec_of(axes, self.parameter)
        divides = (axis.size % self._devices(entry) == 0 for axis, entry in zip(axes, spec, strict=True))
        return NamedSharding(self.mesh, PartitionSpec(*(e if d else None for e, d in zip(spec, divides, strict=True))))

    def compute_sharding(self, axes: tuple[hax.Axis, ...]) -> NamedSharding:
        """The place of an activation or a batch column with these axes."""
        return NamedSharding(self.mesh, spec_of(axes, self.compute))

    def num_shards(self, logical_axis: str) -> int:
        """Over how many devices computation spreads a logical axis."""
        return self._devices(self.compute.get(logical_axis, ()))

    def _devices(self, entry: str | Sequence[str] | None) -> int:
        """On the mesh axes of one entry of a mapping, or of a `PartitionSpec`."""
        names = (entry,) if isinstance(entry, str) else entry or ()
        return math.prod(self.mesh.shape[name] for name in names)

    def replicated(self) -> NamedSharding:
        """A whole copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())


def spec_of(axes: Sequence[hax.Axis], mapping: ResourceMapping) -> PartitionSpec:
    """Where an array with these axes lies.

    Where two of its axes are mapped onto one mesh axis, the one that the mapping names first has it: with
    `fsdp_axis: [embed, mlp]` a matrix over both is cut along `embed`, and a bias over `mlp` alone along `mlp`.
    """
    own = {axis.name for axis in axes}
    taken: set[str] = set()
    places: dict[str, tuple[str, ...]] = {}
    for name in (name for name in mapping if name in own):
        target = mapping[name]
        free = tuple(t for t in ((target,) if isinstance(target, str) else target) if t not in taken)
        taken.update(free)
        places[name] = free
    return PartitionSpec(*(_entry(places.get(axis.name, ())) for axis in axes))


def _entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return names[0] if len(names) == 1 else names or None


_current: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("jaxlm_layout", default=None)


def current_layout() -> Layout | None:
    """The layout of the enclosing `Layout.use()`, or None outside of any."""
    return _current.get()


def current_platform() -> str:
    """The platform that programs are made for: that of the current layout's devices, else the default one."""
    layout = current_layout()
    return jax.default_backend() if layout is None else layout.platform


def current_device() -> Any:
    """One of the devices that programs are made for, as `current_platform`."""
    layout = current_layout()
    return jax.devices()[0] if layout is None else layout.device


def for_compute(tree: T) -> T:
    """The same parameters under the compute mapping; their gradients come back under the parameter mapping.

    Under FSDP this is the all-gather of one unit in the forward pass, and the reduce-scatter of its gradient in the
    backward pass. Outside of a layout, and on one device, it is the identity.
    """
    return _for_compute(tree, sum_whole=False)


def for_lookup(tree: T) -> T:
    """`for_compute` for embedding tables: their gradient is summed whole before it is cut.

    Left to itself, the partitioner would cut it first, and to that end move all the activations that it is made of.
    """
    return _for_compute(tree, sum_whole=True)


def _for_compute(tree: T, *, sum_whole: bool) -> T:
    layout = current_layout()
    if layout is None or layout.mesh.size == 1:
        return tree
    arrays, rest = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(_gather(arrays, layout, sum_whole), rest)


def at_rest(tree: T, layout: Layout) -> T:
    """Pins parameters or gradients to the parameter mapping (traced)."""
    return tree if layout.mesh.size == 1 else _constrained(tree, layout, layout.parameter)


def _constrained(tree, layout: Layout, mapping: ResourceMapping):
    def place(leaf):
        if not isinstance(leaf, hax.NamedArray):
            return leaf
        place = NamedSharding(layout.mesh, spec_of(leaf.axes, mapping))
        array = jax.lax.with_sharding_constraint(leaf.array, place)
        return hax.NamedArray(array, leaf.axes)

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, hax.NamedArray))


def _gather(arrays, layout: Layout, sum_whole: bool):
    def gathered(tree):
        return _constrained(tree, layout, layout.compute)

    def scattered(cotangent):
        summed = _constrained(cotangent, layout, layout.compute) if sum_whole else cotangent
        return _constrained(summed, layout, layout.parameter)

    if is_twice_differentiable():
        return linear_call(lambda _, tree: gathered(tree), lambda _, cotangent: scattered(cotangent), (), arrays)
    gather = jax.custom_vjp(gathered)
    gather.defvjp(lambda tree: (gathered(tree), None), lambda _, cotangent: (scattered(cotangent),))
    return gather(arrays)


def axis_mapping_table(mapping: ResourceMapping) -> str:
    """`embed: data, mlp: model`, for people to read."""
    return ", ".join(f"{k}: {v if isinstance(v, str) else '+'.join(v)}" for k, v in sorted(mapping.items())) or "none"
