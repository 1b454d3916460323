"""Resolves the mesh keys of the `trainer` section for the available devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from haliax import Axis

from jaxlm.core.axes import VOCAB, axis_names
from jaxlm.core.errors import ConfigError
from jaxlm.core.mesh import (
    AxisMappings,
    MeshAxes,
    MeshConfig,
    MeshShape,
    check_arrays,
    check_axes_used,
    count_groups,
    indivisible_vocabulary,
    make_layout,
    mesh_shape,
)
from jaxlm.core.sharding import Layout, spec_of
from jaxlm.plan.trainer_config import TrainerConfig

_AxisEntries = Mapping[str, str | list[str]]


def plan_mesh(
    trainer: TrainerConfig, axes: Mapping[str, int], arrays: Mapping[str, Sequence[str]], devices: Sequence[Any]
) -> tuple[MeshShape, Layout, list[str]]:
    """Builds the mesh and the axis mappings, and warns about settings that waste devices or are overridden.

    Args:
        axes: the model's logical axes and their sizes.
        arrays: path of each parameter -> the names of its axes.
    """
    shape = _shape(trainer, devices)
    layout = make_layout(shape, _mappings(trainer), axes, devices)
    check_arrays(layout, arrays)
    notes = indivisible_vocabulary(layout, axes.get(VOCAB))
    return shape, layout, [*_overridden(trainer, layout), *check_axes_used(layout, shape), *notes]


def check_cut_axes(layout: Layout, arrays: Mapping[str, Sequence[Axis]], phase: str) -> None:
    """Raises `ConfigError` if the surgeries of a phase leave an axis that does not divide over its devices.

    The model before them has been checked by `make_layout`.

    Args:
        arrays: path of each parameter in the phase -> its axes.
    """
    for path, axes in arrays.items():
        for mapping in (layout.parameter, layout.compute):
            for axis, entry in zip(axes, spec_of(axes, mapping), strict=True):
                num_devices = math.prod(layout.mesh.shape[name] for name in axis_names(entry))
                if axis.name != VOCAB and axis.size % num_devices:
                    raise ConfigError(
                        f"phase '{phase}': after its surgery, the axis '{axis.name}' of {path} has {axis.size} entries, which"
                        f" do not divide over the {num_devices} devices that trainer maps it to. Change the surgery (cut the"
                        f" layers elsewhere), or do not map '{axis.name}'"
                    )


def _shape(trainer: TrainerConfig, devices: Sequence[Any]) -> MeshShape:
    if trainer.mesh is None:
        groups = count_groups(devices, group_by_process=trainer.replica_dcn_axis_size > 1)
        return mesh_shape(
            len(devices),
            replica=trainer.replica_ici_axis_size,
            model=trainer.model_axis_size,
            replica_dcn=trainer.replica_dcn_axis_size,
            num_groups=groups,
        )
    for name in ("model_axis_size", "replica_ici_axis_size", "replica_dcn_axis_size"):
        if (size := getattr(trainer, name)) != 1:
            raise ConfigError(f"trainer.{name}: {size} given, but trainer.mesh.axes sets the mesh sizes. Remove one")
    return trainer.mesh.shape(len(devices), count_groups(devices, group_by_process=trainer.mesh.spans_groups))


def _mappings(trainer: TrainerConfig) -> AxisMappings:
    """Merges `trainer.mesh` and the other mapping keys. For each axis, entries of `trainer.mesh` take precedence."""
    free = trainer.mesh or MeshConfig()
    shared = _merged("axis_resources", trainer.axis_resources, "shared_mapping", free.shared_mapping)
    maps_batch = trainer.batch_axis in free.shared_mapping or trainer.batch_axis in free.compute_mapping
    return AxisMappings(
        batch=None if maps_batch else trainer.batch_axis,
        fsdp=tuple(a for a in axis_names(trainer.fsdp_axis) if a not in free.param_mapping),
        tensor_parallel=tuple(a for a in axis_names(trainer.tensor_parallel_axes) if a not in free.shared_mapping),
        shared=shared,
        parameter=_merged(
            "parameter_axis_resources", trainer.parameter_axis_resources, "param_mapping", free.param_mapping
        ),
        compute=_merged(
            "compute_axis_resources", trainer.compute_axis_resources, "compute_mapping", free.compute_mapping
        ),
    )


def _merged(old_name: str, old: _AxisEntries, new_name: str, new: _AxisEntries) -> dict[str, MeshAxes]:
    for axis in old:
        if axis in new and old[axis] != new[axis]:
            raise ConfigError(
                f"trainer.{old_name}.{axis}: {old[axis]} given, but trainer.mesh.{new_name}.{axis}: {new[axis]} sets the same"
                " mapping. Remove one of them"
            )
    return {axis: target if isinstance(target, str) else tuple(target) for axis, target in {**old, **new}.items()}


def _overridden(trainer: TrainerConfig, layout: Layout) -> list[str]:
    """Warnings about entries that other keys override with an effect on this mesh."""
    warnings = []
    for key, written, mapping in (
        ("axis_resources", trainer.axis_resources, layout.compute),
        ("parameter_axis_resources", trainer.parameter_axis_resources, layout.parameter),
    ):
        for axis, target in written.items():
            given, actual = (_sharded_axes(names, layout) for names in (target, mapping[axis]))
            if given != actual and axis not in trainer.compute_axis_resources:
                by = "batch_axis" if axis == trainer.batch_axis else "tensor_parallel_axes, fsdp_axis or trainer.mesh"
                warnings.append(
                    f"trainer.{key}.{axis}: {target} is overridden by {by}: '{axis}' is mapped to {mapping[axis]}"
                )
    return warnings


def _sharded_axes(names: str | Sequence[str], layout: Layout) -> list[str]:
    """The mesh axes among `names` that have more than one device."""
    return [name for name in axis_names(names) if layout.mesh.shape[name] > 1]
