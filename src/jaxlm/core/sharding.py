"""Sharding: a mesh and two mappings from logical axes to mesh axes.

Parameters and optimizer state are stored under the *parameter* mapping (FSDP: `embed` over `data`); computation runs under
the *compute* mapping (`batch` over `replica` and `data`, `mlp` and `heads` over `model`). A model calls `for_compute` on the
parameters of each unit where it uses them, inside the scan over layers, so that only one layer is gathered at a time.
"""

import contextlib
import contextvars
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
from haliax.partitioning import ResourceMapping
from jax.custom_derivatives import linear_call
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.core.axes import BATCH, POSITION, VOCAB, axis_names
from jaxlm.core.tracing import trace_options
from jaxlm.core.tree import is_wide

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionWork:
    """Determines how many keys the queries of a row meet.

    Attributes:
        windows: (window, number of layers that have it) of each kind of layer; None for no window.
        causal: tokens attend to no later tokens.
    """

    windows: tuple[tuple[int | None, int], ...] = ((None, 1),)
    causal: bool = True


@dataclass(frozen=True)
class ContextSharding:
    """Says how devices that divide the tokens of a row divide its attention (context parallelism).

    The position axis is mapped to `gather + ring + heads`, in this order.

    Attributes:
        gather: mesh axes over which each device gathers all keys and values, for its own queries.
        ring: mesh axes around which keys and values travel from device to device.
        heads: mesh axes over which devices exchange tokens for heads (Ulysses).
        balance: the order of the tokens in a batch over `gather + ring`: `none` (that of the text), `zigzag` or `blocks`.
        work: what `blocks` makes equal.
    """

    gather: tuple[str, ...] = ()
    ring: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    balance: str = "none"
    work: AttentionWork = AttentionWork()

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that divide the tokens of a row."""
        return self.gather + self.ring + self.heads

    @property
    def divides_rows(self) -> bool:
        """Tells whether a device computes attention of some queries of a row, instead of some heads of the whole row."""
        return bool(self.gather or self.ring)


UNDIVIDED = ContextSharding()
"""Each device computes the attention of whole rows."""


@dataclass(frozen=True)
class Layout:
    """A device mesh with the parameter and the compute mapping.

    Attributes:
        mesh: the axes replica, data and model, and those of `trainer.mesh`.
        parameter: logical axis -> mesh axis (or axes) for stored parameters, gradients and optimizer state.
        compute: logical axis -> mesh axis (or axes) for activations.
        context: how attention is divided. Its axes are those of `position` in `compute`.
        optimizer_memory: the kind of memory that the optimizer's state is in between steps; None for the devices' own.
    """

    mesh: Mesh
    parameter: ResourceMapping
    compute: ResourceMapping
    context: ContextSharding = UNDIVIDED
    optimizer_memory: str | None = None

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
        """One of the mesh's devices. All are of the same kind; they may be abstract."""
        return self.mesh.devices.flat[0]

    @property
    def platform(self) -> str:
        """Platform of the mesh's devices: `cpu`, `gpu` or `tpu`."""
        return "gpu" if self.device.platform in ("cuda", "rocm") else self.device.platform

    def rows(self) -> Iterator[tuple[str, str]]:
        """The axis mappings, and whether a resumed run is the same bit for bit, for the plan's table."""
        yield "parameter sharding", axis_mapping_table(self.parameter)
        yield "compute sharding", axis_mapping_table(self.compute)
        if self.platform == "gpu":  # only there is that a choice
            yield "repeatable", repeatability(os.environ.get("XLA_FLAGS", ""))

    def parameter_sharding(self, axes: tuple[hax.Axis, ...]) -> NamedSharding:
        """Sharding of a stored parameter or optimizer state with these axes.

        The mesh axes of a vocabulary that they do not divide shard another axis of the array. Any other axis that is not
        divisible by its mesh axes is replicated. This only happens to optimizer state: the plan has checked the parameters.
        """
        entries = [axis_names(entry) for entry in spec_of(axes, self.parameter)]
        moved: list[str] = []
        for dim, axis in enumerate(axes):
            if not self._divides(axis, entries[dim]):
                moved += entries[dim] if axis.name == VOCAB else ()
                entries[dim] = ()
        for name in moved:
            for dim, axis in enumerate(axes):
                if axis.name != VOCAB and self._divides(axis, (*entries[dim], name)):
                    entries[dim] = (*entries[dim], name)
                    break
        return NamedSharding(self.mesh, PartitionSpec(*map(_entry, entries)))

    def compute_sharding(self, axes: tuple[hax.Axis, ...]) -> NamedSharding:
        """Sharding of a parameter in use, an activation or a batch column with these axes.

        A vocabulary that its mesh axes do not divide is replicated. The loss pads it and shards it (`TokenSharding`). So are
        the scales of a stored weight with fewer blocks than devices. The plan has checked all other axes.
        """
        spec = spec_of(axes, self.compute)
        entries = (
            entry if axis.name in (BATCH, POSITION) or self._divides(axis, entry) else None
            for axis, entry in zip(axes, spec, strict=True)
        )
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def num_shards(self, logical_axis: str) -> int:
        """Number of shards of a logical axis under the compute mapping."""
        return self._devices(self.compute.get(logical_axis, ()))

    @property
    def num_row_shards(self) -> int:
        """Number of shards of a row that have queries of their own. Devices that exchange heads share one."""
        return self._devices(self.context.gather + self.context.ring)

    def _devices(self, entry: str | Sequence[str] | None) -> int:
        """Number of devices along the mesh axes of one entry of a mapping or a `PartitionSpec`."""
        return math.prod(self.mesh.shape[name] for name in axis_names(entry))

    def _divides(self, axis: hax.Axis, entry: str | Sequence[str] | None) -> bool:
        return axis.size % self._devices(entry) == 0

    def replicated(self) -> NamedSharding:
        """Sharding with a full copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())


def spec_of(axes: Sequence[hax.Axis], mapping: ResourceMapping) -> PartitionSpec:
    """The `PartitionSpec` of an array with these axes.

    If two of its axes map to the same mesh axis, the one that comes first in the mapping gets it: with
    `fsdp_axis: [embed, mlp]`, a matrix with both axes is sharded along `embed`, and a bias with only `mlp` along `mlp`.
    """
    names = {axis.name for axis in axes}
    used: set[str] = set()
    entries: dict[str, tuple[str, ...]] = {}
    for name in (name for name in mapping if name in names):
        free = tuple(target for target in axis_names(mapping[name]) if target not in used)
        used.update(free)
        entries[name] = free
    return PartitionSpec(*(_entry(entries.get(axis.name, ())) for axis in axes))


def _entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return names[0] if len(names) == 1 else names or None


_current: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("jaxlm_layout", default=None)


def current_layout() -> Layout | None:
    """The layout of the enclosing `Layout.use()`, or None if there is none."""
    return _current.get()


def current_platform() -> str:
    """The platform that programs are compiled for: that of the current layout, or jax's default."""
    layout = current_layout()
    return jax.default_backend() if layout is None else layout.platform


def current_device() -> Any:
    """One of the devices that programs are compiled for: of the current layout, or jax's first."""
    layout = current_layout()
    return jax.devices()[0] if layout is None else layout.device


def replicated(arrays: T) -> T:
    """Copies arrays whole to every device, so that every process can read them. Call it in traced code."""
    layout = current_layout()
    return arrays if layout is None else jax.lax.with_sharding_constraint(arrays, layout.replicated())


def for_lookup(tree: T) -> T:
    """`for_compute` for embedding tables whose rows `rows_of` takes: their gradient is summed in full before it is sharded.

    Otherwise the partitioner shards the gradient first, and to do so it moves all activations that the gradient is
    computed from. Gradients of tables in reduced precision are summed before they are rounded (`summed_rows`).
    """
    wide, rest = eqx.partition(tree, is_wide)
    return eqx.combine(for_compute(wide, sum_first=True), for_compute(rest))


def summed_rows(gradient: T) -> T:
    """The gradient of an embedding table, summed over devices and then sharded as the table is, in the dtype given."""
    layout = current_layout()
    return gradient if layout is None or layout.mesh.size == 1 else _scattered(gradient, layout, sum_first=True)


def for_compute(tree: T, *, sum_first: bool = False) -> T:
    """Reshards parameters to the compute mapping. Their gradients are resharded to the parameter mapping.

    Under FSDP this is an all-gather of one unit in the forward pass and a reduce-scatter of its gradient in the backward
    pass. Without a layout, and on one device, it is the identity.
    """
    layout = current_layout()
    if layout is None or layout.mesh.size == 1:
        return tree
    arrays, rest = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(_gather(arrays, layout, sum_first), _constrained(rest, layout.compute_sharding))


def at_rest(tree: T, layout: Layout) -> T:
    """Constrains parameters or gradients to the parameter mapping. Call it in traced code."""
    return tree if layout.mesh.size == 1 else _constrained(tree, layout.parameter_sharding)


def _constrained(tree, sharding_of: Callable[[tuple[hax.Axis, ...]], NamedSharding]):
    def constrain(leaf):
        if not isinstance(leaf, hax.NamedArray) or leaf.array is None:
            return leaf
        array = jax.lax.with_sharding_constraint(leaf.array, sharding_of(leaf.axes))
        return hax.NamedArray(array, leaf.axes)

    return jax.tree.map(constrain, tree, is_leaf=lambda x: isinstance(x, hax.NamedArray))


def _gather(arrays, layout: Layout, sum_first: bool):
    def gathered(tree):
        return _constrained(tree, layout.compute_sharding)

    def scattered(cotangent):
        return _scattered(cotangent, layout, sum_first)

    if trace_options().twice_differentiable:
        # One call per leaf: jax cannot differentiate a call if only some of its arguments have tangents.
        gather_leaf = functools.partial(
            linear_call, lambda _, leaf: gathered(leaf), lambda _, leaf: scattered(leaf), ()
        )
        return jax.tree.map(gather_leaf, arrays, is_leaf=lambda x: isinstance(x, hax.NamedArray))
    gather = jax.custom_vjp(gathered)
    gather.defvjp(lambda tree: (gathered(tree), None), lambda _, cotangent: (scattered(cotangent),))
    return gather(arrays)


def _scattered(gradient, layout: Layout, sum_first: bool):
    summed = _constrained(gradient, layout.compute_sharding) if sum_first else gradient
    return _constrained(summed, layout.parameter_sharding)


def axis_mapping_table(mapping: ResourceMapping) -> str:
    """Formats a mapping as `embed: data, mlp: model`."""
    return ", ".join(f"{axis}: {'+'.join(axis_names(target))}" for axis, target in sorted(mapping.items())) or "none"


_DETERMINISTIC = "xla_gpu_deterministic_ops"


def repeatability(xla_flags: str) -> str:
    """Tells whether a resumed run on GPUs is the same bit for bit."""
    values = [flag.lstrip("-").partition("=")[2] for flag in xla_flags.split() if _DETERMINISTIC in flag]
    if values and values[-1].lower() in ("true", "1", ""):
        return f"bit for bit (--{_DETERMINISTIC})"
    hint = f"for bitwise resumption, start with XLA_FLAGS=--{_DETERMINISTIC}=true, which is slower"
    return f"within rounding, because some GPU kernels add in no fixed order; {hint}"
