"""The device mesh: its axes and their sizes, the devices in their places, and which logical axes go where."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxlm.core.axes import BATCH, DATA, HEADS, KV_HEADS, MESH_AXES, MODEL, POSITION, REPLICA
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout

MeshAxes = str | tuple[str, ...]
REST = -1
"""The size that stands for the devices which the other axes leave."""


@dataclass(frozen=True)
class MeshConfig:
    """A mesh of one's own axes, for what `model_axis_size` and `replica_*_axis_size` cannot say.

    Attributes:
        axes: mesh axis to the number of devices along it, the one with the fastest links last; -1 takes what is left.
            `replica`, `data` and `model` are there with size 1 where they are not named.
        dcn_axes: the same across slices or, where there are none, processes: of an axis of `axes` the outer part.
        shared_mapping: logical axis to mesh axis, for parameters and computation.
        compute_mapping: the same for computation alone.
        param_mapping: the same for parameters at rest alone; it replaces what `fsdp_axis` says of an axis.
    """

    axes: dict[str, int] = field(default_factory=lambda: {DATA: REST})
    dcn_axes: dict[str, int] = field(default_factory=dict)
    shared_mapping: dict[str, str | list[str]] = field(default_factory=dict)
    compute_mapping: dict[str, str | list[str]] = field(default_factory=dict)
    param_mapping: dict[str, str | list[str]] = field(default_factory=dict)

    def shape(self, num_devices: int, num_groups: int) -> "MeshShape":
        """The sizes for so many devices, in groups with fast links inside.

        Raises:
            ConfigError: they do not use exactly the devices that there are.
        """
        given = dict(self.axes)
        missing = [name for name in MESH_AXES if name not in given and name not in self.dcn_axes]
        inner = {**dict.fromkeys(missing, 1), **given}
        across = dict(self.dcn_axes) or ({DATA: num_groups} if num_groups > 1 else {})
        return MeshShape(
            _filled(inner, num_devices // num_groups, "trainer.mesh.axes", "devices"),
            _filled(across, num_groups, "trainer.mesh.dcn_axes", "slices or processes"),
        )

    @property
    def spans_groups(self) -> bool:
        """Whether it says what lies across slices or processes."""
        return any(size != 1 for size in self.dcn_axes.values())


def _filled(sizes: Mapping[str, int], num_there: int, key: str, of_what: str) -> dict[str, int]:
    """The sizes with the one that is -1 worked out."""
    rest = [name for name, size in sizes.items() if size == REST]
    wrong = {name: size for name, size in sizes.items() if size < 1 and size != REST}
    if wrong or len(rest) > 1:
        raise ConfigError(f"{key}: {dict(sizes)} given; sizes are 1 or more, and one of them may be -1")
    fixed = math.prod(size for size in sizes.values() if size != REST)
    if num_there % fixed or (not rest and fixed != num_there):
        hint = " Let one of the sizes be -1 to take what is left" if not rest else ""
        raise ConfigError(
            f"{key}: the sizes {dict(sizes)} multiply to {fixed}, which does not use the {num_there} {of_what}"
            f" exactly.{hint}"
        )
    return {name: num_there // fixed if size == REST else size for name, size in sizes.items()}


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes.

    Attributes:
        inner: axis -> devices along it within a group of devices with fast links (a slice), outermost first.
        across: axis -> groups along it. An axis may be in both: its outer part lies across groups.
    """

    inner: Mapping[str, int]
    across: Mapping[str, int] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> devices along it in all, outermost first."""
        names = [*(name for name in self.across if name not in self.inner), *self.inner]
        return {name: self.across.get(name, 1) * self.inner.get(name, 1) for name in names}

    @property
    def replica(self) -> int:
        """Groups of devices that hold the whole model each (HSDP's outer axis)."""
        return self.sizes.get(REPLICA, 1)

    @property
    def data(self) -> int:
        """Devices that share one copy of the parameters (FSDP)."""
        return self.sizes.get(DATA, 1)

    @property
    def model(self) -> int:
        """Devices that share each layer's computation (tensor parallel)."""
        return self.sizes.get(MODEL, 1)

    def arrange(self, devices: Sequence[Any]) -> np.ndarray:
        """The devices {axis, ...}, those of a group together along the inner parts of the axes."""
        num_groups = math.prod(self.across.values())
        if num_groups > 1:
            devices = sorted(devices, key=lambda device: (_group(device), device.id))
        names = list(self.sizes)
        outer, inner = ([part.get(name, 1) for name in names] for part in (self.across, self.inner))
        grid = np.asarray(devices).reshape(outer + inner)
        interleaved = [axis for n in range(len(names)) for axis in (n, n + len(names))]
        return grid.transpose(interleaved).reshape(list(self.sizes.values()))

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items())


def mesh_shape(
    num_devices: int, *, replica: int = 1, model: int = 1, replica_dcn: int = 1, num_groups: int = 1
) -> MeshShape:
    """The three axes of the guide: `data` gets what `replica` and `model` leave, within groups and across them.

    Raises:
        ConfigError: replica x model does not divide the devices of a group, or replica_dcn the groups.
    """
    sizes = {"replica_ici_axis_size": replica, "model_axis_size": model, "replica_dcn_axis_size": replica_dcn}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"trainer.{name}: {size} given, 1 or more expected")
    there = num_devices // num_groups
    if there % (replica * model):
        raise ConfigError(
            f"trainer.model_axis_size x trainer.replica_ici_axis_size = {model} x {replica} = {replica * model} does not"
            f" divide the {there} devices. Allowed products: {', '.join(map(str, _divisors(there)))}"
        )
    if num_groups % replica_dcn:
        raise ConfigError(
            f"trainer.replica_dcn_axis_size: {replica_dcn} given, which does not divide the {num_groups} slices (or"
            f" processes, where there are no slices). Allowed: {', '.join(map(str, _divisors(num_groups)))}"
        )
    across = {REPLICA: replica_dcn, DATA: num_groups // replica_dcn}
    return MeshShape({REPLICA: replica, DATA: there // (replica * model), MODEL: model}, across)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def num_groups(devices: Sequence[Any], *, wanted: bool) -> int:
    """How many groups with fast links inside there are: TPU slices, or, where groups are wanted, processes."""
    groups = {_group(device) for device in devices}
    return len(groups) if wanted or _has_slices(devices[0]) else 1


def _group(device: Any) -> int:
    return device.slice_index if _has_slices(device) else device.process_index


def _has_slices(device: Any) -> bool:
    return device.platform == "tpu" and getattr(device, "slice_index", None) is not None


@dataclass(frozen=True)
class AxisMappings:
    """Which logical axes go where.

    Attributes:
        batch: the logical axis that is spread over `replica` and `data`; None spreads nothing.
        fsdp: logical axes whose parameters rest spread over `data`.
        tensor_parallel: logical axes that are spread over `model` in parameters and computation.
        shared: further entries of both mappings.
        parameter: further entries of the parameter mapping.
        compute: further entries of the compute mapping.
    """

    batch: str | None
    fsdp: tuple[str, ...]
    tensor_parallel: tuple[str, ...]
    shared: Mapping[str, MeshAxes]
    parameter: Mapping[str, MeshAxes]
    compute: Mapping[str, MeshAxes] = field(default_factory=dict)


# The mesh axes that a batch is spread over, as far as the mesh has them.
_BATCH_OVER = ("replica_dcn", REPLICA, DATA)


def make_layout(
    shape: MeshShape, mappings: AxisMappings, logical_axes: Mapping[str, int], devices: Sequence[Any] | None = None
) -> Layout:
    """Arranges all devices of all processes (or `devices`) and writes out both mappings.

    Order: `shared`, then tensor parallel, then the batch axis. The compute mapping takes `compute` over that; the
    parameter mapping takes `parameter`, then FSDP, which wins. `heads` under tensor parallel takes `kv_heads` along where
    those divide.

    Args:
        logical_axes: the model's parameter axes and their sizes, to catch names that do not exist and sizes that do
            not divide.

    Raises:
        ConfigError: an unknown logical or mesh axis, one that is mapped to nothing, a size that its mesh axes do not
            divide, or a mesh axis whose devices would all do the same.
    """
    sizes = shape.sizes
    both: dict[str, MeshAxes] = dict(mappings.shared)
    both.update(dict.fromkeys(mappings.tensor_parallel, MODEL))
    if HEADS in mappings.tensor_parallel and logical_axes.get(KV_HEADS, 1) % shape.model == 0:
        both.setdefault(KV_HEADS, MODEL)
    if mappings.batch is not None:
        both[mappings.batch] = tuple(name for name in _BATCH_OVER if name in sizes)
    compute = {**both, **mappings.compute}
    parameter = {**both, **mappings.parameter, **dict.fromkeys(mappings.fsdp, DATA)}
    for mapping in (compute, parameter):
        _check_mapping(mapping, sizes, logical_axes)
    grid = shape.arrange(jax.devices() if devices is None else devices)
    mesh = Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return Layout(mesh, parameter, compute)


def _check_mapping(mapping: Mapping[str, MeshAxes], sizes: Mapping[str, int], logical_axes: Mapping[str, int]) -> None:
    for axis, target in mapping.items():
        if axis not in (BATCH, POSITION) and axis not in logical_axes:
            raise ConfigError(
                f"trainer: the axis mappings name the logical axis '{axis}', which the model does not have."
                f" Its axes: {', '.join(sorted(logical_axes))}"
            )
        names = (target,) if isinstance(target, str) else target
        if not names:
            raise ConfigError(f"trainer: '{axis}' is mapped to nothing. Leave it out, or name of: {', '.join(sizes)}")
        for name in names:
            if name not in sizes:
                raise ConfigError(f"trainer: '{axis}' is mapped to '{name}'. Mesh axes: {', '.join(sizes)}")
        num_shards = math.prod(sizes[name] for name in names)
        if axis in logical_axes and logical_axes[axis] % num_shards:
            raise ConfigError(
                f"trainer: '{axis}' has size {logical_axes[axis]}, which the {num_shards} devices of mesh axis {target} do"
                f" not divide. Change the model's size, the mesh, or the mapping"
            )


def check_axes_used(layout: Layout, shape: MeshShape) -> list[str]:
    """What is to be said of mesh axes along which the devices compute the same.

    Raises:
        ConfigError: nothing at all is mapped onto an axis of several devices.
    """
    idle = [name for name, size in shape.sizes.items() if size > 1 and name not in _targets_of(layout.compute)]
    for name in idle:
        if name not in _targets_of(layout.parameter):
            key = "trainer.tensor_parallel_axes: [mlp, heads]" if name == MODEL else "the axis mappings"
            raise ConfigError(
                f"trainer: the mesh axis '{name}' has {shape.sizes[name]} devices and no logical axis is mapped onto it:"
                f" all of them would do the same. Map one with {key}, or let '{name}' have size 1"
            )
    return [
        f"no axis of the computation is mapped onto '{name}': its {shape.sizes[name]} devices share the memory for the"
        " parameters, and compute the same"
        for name in idle
    ]


def check_arrays(layout: Layout, arrays: Mapping[str, Sequence[str]]) -> None:
    """Raises `ConfigError` where the compute mapping spreads two axes of one array over the same mesh axis.

    Parameters at rest need no such check: there the first of the mapping's axes has it (`Layout.parameter_sharding`).

    Args:
        arrays: path of each parameter -> the names of its axes.
    """
    for path, axes in arrays.items():
        taken: dict[str, str] = {}
        for axis in axes:
            for name in _targets_of({axis: layout.compute[axis]} if axis in layout.compute else {}):
                if name in taken:
                    raise ConfigError(
                        f"trainer: '{taken[name]}' and '{axis}' are both mapped onto '{name}' for computation, and"
                        f" {path} has both. Leave one of them out (trainer.tensor_parallel_axes, axis_resources, mesh)"
                    )
                taken[name] = axis


def _targets_of(mapping: Mapping[str, Any]) -> set[str]:
    return {name for target in mapping.values() for name in ((target,) if isinstance(target, str) else target)}
