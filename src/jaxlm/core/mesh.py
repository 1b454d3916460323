"""The device mesh: axis sizes, device order, and the mapping of logical axes to mesh axes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxlm.core.axes import (
    BATCH,
    CONTEXT,
    CONTEXT_HEADS,
    DATA,
    EMBED,
    EXPERTS,
    HEADS,
    KEY_POSITION,
    KV_HEADS,
    LATENT,
    LAYER_INPUTS,
    LAYERS,
    MESH_AXES,
    MODEL,
    POSITION,
    QUERY_LATENT,
    REPLICA,
    REPLICA_DCN,
    STATE_HEADS,
    VALUE_EMBED,
    VOCAB,
    axis_names,
)
from jaxlm.core.errors import ConfigError, divisors
from jaxlm.core.sharding import UNDIVIDED, ContextSharding, Layout

MeshAxes = str | tuple[str, ...]
ALL_REMAINING = -1
"""The axis size that means all remaining devices."""


@dataclass(frozen=True)
class MeshConfig:
    """A custom mesh, for layouts that `model_axis_size` and `replica_*_axis_size` cannot express.

    Attributes:
        axes: number of devices along each mesh axis, slowest links first and fastest links last. -1 uses all remaining
            devices. If you omit them, `replica` and `model` get size 1, and `data` all remaining devices, unless another axis
            does.
        dcn_axes: number of slices along each mesh axis, or of processes if there are no slices. An axis that is also in
            `axes` gets both sizes multiplied, with the slices as its outer part. If empty, slices are the outer part of
            `data`, or of `replica_dcn` if a mapping names this axis.
        shared_mapping: logical-to-mesh axis mapping for both parameters and computation.
        compute_mapping: logical-to-mesh axis mapping for computation only.
        param_mapping: logical-to-mesh axis mapping for stored parameters only; it overrides `fsdp_axis` for its axes.
    """

    axes: dict[str, int] = field(default_factory=lambda: {DATA: ALL_REMAINING})
    dcn_axes: dict[str, int] = field(default_factory=dict)
    shared_mapping: dict[str, str | list[str]] = field(default_factory=dict)
    compute_mapping: dict[str, str | list[str]] = field(default_factory=dict)
    param_mapping: dict[str, str | list[str]] = field(default_factory=dict)

    def shape(self, num_devices: int, num_groups: int) -> "MeshShape":
        """Resolves the axis sizes for `num_devices` devices in `num_groups` groups with fast links inside."""
        mappings = (self.shared_mapping, self.compute_mapping, self.param_mapping)
        named = any(REPLICA_DCN in axis_names(target) for mapping in mappings for target in mapping.values())
        known = (REPLICA_DCN, *MESH_AXES) if named else MESH_AXES
        missing = [name for name in known if name not in self.axes and name not in self.dcn_axes]
        rest = 1 if ALL_REMAINING in self.axes.values() else ALL_REMAINING
        ici = {**{name: rest if name == DATA else 1 for name in missing}, **self.axes}
        dcn = dict(self.dcn_axes) or ({REPLICA_DCN if named else DATA: num_groups} if num_groups > 1 else {})
        return MeshShape(
            _resolve_sizes(ici, num_devices // num_groups, "trainer.mesh.axes", "devices"),
            _resolve_sizes(dcn, num_groups, "trainer.mesh.dcn_axes", "slices or processes"),
        )

    @property
    def spans_groups(self) -> bool:
        """Tells whether any axis spans slices or processes."""
        return any(size != 1 for size in self.dcn_axes.values())


def _resolve_sizes(sizes: Mapping[str, int], total: int, key: str, unit: str) -> dict[str, int]:
    """Replaces a size of -1 by the remaining number of devices or groups."""
    rest = [name for name, size in sizes.items() if size == ALL_REMAINING]
    invalid = {name: size for name, size in sizes.items() if size < 1 and size != ALL_REMAINING}
    if invalid or len(rest) > 1:
        raise ConfigError(f"{key}: {dict(sizes)} given; sizes must be 1 or more, and at most one may be -1")
    fixed = math.prod(size for size in sizes.values() if size != ALL_REMAINING)
    if total % fixed or (not rest and fixed != total):
        hint = " Set one of the sizes to -1 to use all remaining ones" if not rest else ""
        raise ConfigError(
            f"{key}: the sizes {dict(sizes)} multiply to {fixed}, which does not use the {total} {unit} exactly.{hint}"
        )
    return {name: total // fixed if size == ALL_REMAINING else size for name, size in sizes.items()}


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes.

    Attributes:
        ici: axis -> devices along it within a group of devices with fast links (a TPU slice or a process), outermost first.
        dcn: axis -> groups along it. The outer part of an axis in both mappings spans groups.
    """

    ici: Mapping[str, int]
    dcn: Mapping[str, int] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> total number of devices along it, outermost first."""
        names = [*(name for name in self.dcn if name not in self.ici), *self.ici]
        return {name: self.dcn.get(name, 1) * self.ici.get(name, 1) for name in names}

    @property
    def replica(self) -> int:
        """Number of groups of devices that each hold a full copy of the parameters (outer axis of HSDP)."""
        return self.sizes.get(REPLICA, 1)

    @property
    def data(self) -> int:
        """Number of devices that share one copy of the parameters (FSDP)."""
        return self.sizes.get(DATA, 1)

    @property
    def context(self) -> int:
        """Number of devices that share the tokens of a row, along the axes of `trainer.context`."""
        return self.sizes.get(CONTEXT, 1) * self.sizes.get(CONTEXT_HEADS, 1)

    @property
    def model(self) -> int:
        """Number of devices that share each layer's computation (tensor parallelism)."""
        return self.sizes.get(MODEL, 1)

    def arrange(self, devices: Sequence[Any]) -> np.ndarray:
        """Arranges devices to an array with the mesh axes. Devices of a group are contiguous along the `ici` parts."""
        num_groups = math.prod(self.dcn.values())
        if num_groups > 1:
            devices = sorted(devices, key=lambda device: (_group(device), device.id))
        names = list(self.sizes)
        dcn, ici = ([part.get(name, 1) for name in names] for part in (self.dcn, self.ici))
        grid = np.asarray(devices).reshape(dcn + ici)
        interleaved = [axis for n in range(len(names)) for axis in (n, n + len(names))]
        return grid.transpose(interleaved).reshape(list(self.sizes.values()))

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items())


def mesh_shape(
    num_devices: int,
    *,
    replica: int = 1,
    model: int = 1,
    replica_dcn: int = 1,
    num_groups: int = 1,
    context: Mapping[str, int] = MappingProxyType({}),
) -> MeshShape:
    """The default mesh: `data` gets the devices that remain after `replica`, `context` and `model`.

    Args:
        context: sizes of the axes between `data` and `model`, along which devices share the tokens of a row.
    """
    group_size = num_devices // num_groups
    if group_size % (replica * model):
        raise ConfigError(
            f"trainer.model_axis_size x trainer.replica_ici_axis_size = {model} x {replica} = {replica * model} does not"
            f" divide the {group_size} devices. Allowed products: {', '.join(divisors(group_size))}"
        )
    left, shared = group_size // (replica * model), math.prod(context.values())
    if left % shared:
        raise ConfigError(
            f"trainer.context.size: {shared} given, which does not divide the {left} devices that"
            f" trainer.model_axis_size and trainer.replica_ici_axis_size leave. Allowed: {', '.join(divisors(left))}"
        )
    if num_groups % replica_dcn:
        raise ConfigError(
            f"trainer.replica_dcn_axis_size: {replica_dcn} given, which does not divide the {num_groups} slices (or"
            f" processes, if there are no slices). Allowed: {', '.join(divisors(num_groups))}"
        )
    dcn = {REPLICA: replica_dcn, DATA: num_groups // replica_dcn}
    return MeshShape({REPLICA: replica, DATA: left // shared, **context, MODEL: model}, dcn)


def count_groups(devices: Sequence[Any], *, group_by_process: bool) -> int:
    """Number of device groups with fast links inside: TPU slices, or with `group_by_process` processes if there are none."""
    groups = {_group(device) for device in devices}
    return len(groups) if group_by_process or _has_slices(devices[0]) else 1


def _group(device: Any) -> int:
    return device.slice_index if _has_slices(device) else device.process_index


def _has_slices(device: Any) -> bool:
    return device.platform == "tpu" and getattr(device, "slice_index", None) is not None


@dataclass(frozen=True)
class AxisMappings:
    """The logical-to-mesh axis mappings of a run's configuration.

    Attributes:
        batch: logical axis sharded over `replica` and `data`; None shards none.
        fsdp: logical axes along which stored parameters are sharded over `data`.
        tensor_parallel: logical axes sharded over `model`, in parameters and computation.
        shared, parameter, compute: further entries of both mappings, and of each.
    """

    batch: str | None
    fsdp: tuple[str, ...]
    tensor_parallel: tuple[str, ...]
    shared: Mapping[str, MeshAxes]
    parameter: Mapping[str, MeshAxes]
    compute: Mapping[str, MeshAxes] = field(default_factory=dict)


def make_layout(
    shape: MeshShape,
    mappings: AxisMappings,
    logical_axes: Mapping[str, int],
    devices: Sequence[Any] | None = None,
    context: ContextSharding | None = None,
) -> Layout:
    """Builds the mesh from all devices of all processes (or `devices`), and both axis mappings.

    Later entries override earlier ones: `shared`, tensor parallelism, the batch axis; then `compute` for the compute
    mapping, and `parameter` and FSDP for the parameter mapping. Tensor parallelism over `heads` includes `kv_heads` and
    `state_heads` if the model axis divides them, and FSDP over `embed` includes `value_embed`, `layer_inputs`,
    `query_latent` and `latent` if its mesh axes divide them.
    FSDP shards over the data axis and those of `context`.

    Args:
        logical_axes: sizes of the model's parameter axes, to detect unknown names and sizes that do not divide.
        context: how attention is divided; `position` is mapped to its axes. None if it is not.
    """
    sizes = shape.sizes
    both: dict[str, MeshAxes] = dict(mappings.shared)
    both.update(dict.fromkeys(mappings.tensor_parallel, MODEL))
    if HEADS in mappings.tensor_parallel and logical_axes.get(KV_HEADS, 1) % shape.model == 0:
        both.setdefault(KV_HEADS, MODEL)
    if (
        HEADS in mappings.tensor_parallel
        and STATE_HEADS in logical_axes
        and logical_axes[STATE_HEADS] % shape.model == 0
    ):
        both.setdefault(STATE_HEADS, MODEL)
    if mappings.batch is not None:
        both[mappings.batch] = tuple(name for name in (REPLICA_DCN, REPLICA, DATA) if name in sizes)
    compute, context = {**both, **mappings.compute}, context or UNDIVIDED
    if context.axes:
        compute[POSITION] = context.axes
        compute.setdefault(KEY_POSITION, context.axes)  # the slots of a KV cache
    # Other axes of the default mesh have a meaning of their own for parameters.
    sharing = tuple(name for name in context.axes if name not in MESH_AXES)
    fsdp: MeshAxes = (DATA, *sharing) if sharing else DATA
    parameter = {**both, **mappings.parameter, **dict.fromkeys(mappings.fsdp, fsdp)}
    num_shards = math.prod(sizes.get(name, 1) for name in axis_names(fsdp))
    for axis in (VALUE_EMBED, LAYER_INPUTS, QUERY_LATENT, LATENT) if EMBED in mappings.fsdp else ():
        if axis in logical_axes and logical_axes[axis] % num_shards == 0:
            parameter.setdefault(axis, fsdp)
    for mapping in (compute, parameter):
        _check_mapping(mapping, sizes, logical_axes)
    grid = shape.arrange(jax.devices() if devices is None else devices)
    mesh = Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return Layout(mesh, parameter, compute, context)


def _check_mapping(mapping: Mapping[str, MeshAxes], sizes: Mapping[str, int], logical_axes: Mapping[str, int]) -> None:
    for axis, target in mapping.items():
        if axis not in (BATCH, POSITION, KEY_POSITION) and axis not in logical_axes:
            raise ConfigError(
                f"trainer: the axis mappings contain the logical axis '{axis}', which the model does not have."
                f" Its axes are: {', '.join(sorted(logical_axes))}"
            )
        if not (names := axis_names(target)):
            raise ConfigError(f"trainer: '{axis}' is mapped to nothing. Remove it, or map it to: {', '.join(sizes)}")
        for name in names:
            if name not in sizes:
                raise ConfigError(
                    f"trainer: '{axis}' is mapped to '{name}', which is not a mesh axis. Mesh axes: {', '.join(sizes)}"
                )
        num_shards = math.prod(sizes[name] for name in names)
        if axis != VOCAB and axis in logical_axes and logical_axes[axis] % num_shards:
            raise ConfigError(
                f"trainer: '{axis}' has size {logical_axes[axis]}, which is not divisible by the {num_shards} devices of"
                f" mesh axis {target}. Change the model's size, the mesh, or the mapping"
            )


def check_axes_used(layout: Layout, shape: MeshShape) -> list[str]:
    """Warnings about mesh axes along which devices repeat computation. An axis without any use raises `ConfigError`."""
    idle = [name for name, size in shape.sizes.items() if size > 1 and name not in _targets_of(layout.compute)]
    for name in idle:
        if name not in _targets_of(layout.parameter):
            key = "trainer.tensor_parallel_axes: [mlp, heads]" if name == MODEL else "the axis mappings"
            raise ConfigError(
                f"trainer: the mesh axis '{name}' has {shape.sizes[name]} devices and no logical axis is mapped to it, so"
                f" all of them would do the same work. Map an axis with {key}, or set the size of '{name}' to 1"
            )
    return [
        f"no axis of the compute mapping is mapped to '{name}': its {shape.sizes[name]} devices share the parameter"
        " memory but repeat the same computation"
        for name in idle
    ]


def indivisible_vocabulary(layout: Layout, vocab_size: int | None) -> list[str]:
    """A note on how a vocabulary is sharded that its mesh axes do not divide. Args: vocab_size: None if there is none."""
    num_shards = layout.num_shards(VOCAB)
    if vocab_size is None or vocab_size % num_shards == 0:
        return []
    shared = f"the {vocab_size:,} tokens of the vocabulary do not divide by the {num_shards} devices that share it"
    return [f"{shared}: the loss pads them, and stored weights are sharded along another axis"]


def check_arrays(layout: Layout, arrays: Mapping[str, Sequence[str]]) -> None:
    """Raises `ConfigError` if the compute mapping shards two axes of one array over the same mesh axis.

    Stored parameters need no check: there the first axis of the mapping gets the mesh axis (`Layout.parameter_sharding`).

    Args:
        arrays: names of the axes of each parameter, by path. Activations have the axes of a batch, and one of these.
    """
    _check_distinct(layout, (BATCH, POSITION), "every batch")
    for path, axes in arrays.items():
        _check_distinct(layout, axes, path)
        for axis in axes:
            if axis not in (*_NOT_OF_ACTIVATIONS, BATCH, POSITION):
                _check_distinct(layout, (BATCH, POSITION, axis), f"what is computed with {path}")


# Experts read tokens in an order of their own.
_NOT_OF_ACTIVATIONS = (LAYERS, EXPERTS)


def _check_distinct(layout: Layout, axes: Sequence[str], what: str) -> None:
    taken: dict[str, str] = {}
    for axis in axes:
        for name in set(axis_names(layout.compute.get(axis))):
            if name in taken:
                raise ConfigError(
                    f"trainer: '{taken[name]}' and '{axis}' are both mapped to '{name}' for computation, and {what} has both."
                    " Remove one of them (trainer.batch_axis, tensor_parallel_axes, axis_resources, compute_axis_resources,"
                    f" mesh), or shard only the stored parameters: trainer.parameter_axis_resources: {{{axis}: {name}}}"
                )
            taken[name] = axis


def _targets_of(mapping: Mapping[str, Any]) -> set[str]:
    return {name for target in mapping.values() for name in axis_names(target)}
