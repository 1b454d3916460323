"""The sharding keys of the `trainer` section, resolved for the available devices."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxlm.core import tree
from jaxlm.core.axes import CONTEXT, POSITION, VOCAB, axis_names
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
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
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.core.rules import Rules, excludes
from jaxlm.core.sharding import Layout, spec_of
from jaxlm.models.base import LanguageModel
from jaxlm.models.moe import check_expert_sharding
from jaxlm.plan.context.choice import ContextChoice, Rows
from jaxlm.plan.context.config import ContextConfig, check_context, plan_context
from jaxlm.reading.effects import field


@dataclass(frozen=True)
class ShardingConfig:
    """The keys of `trainer` for the mesh, and which axes are sharded over it.

    Attributes:
        batch_axis: logical axis to shard over the replica and data mesh axes; null shards none.
        fsdp_axis: logical axes along which parameters are sharded over the data mesh axis (FSDP); null shards
            none, so that every device holds all parameters (DDP).
        tensor_parallel_axes: logical axes to shard over the model mesh axis. `heads` also shards `kv_heads` if the axis
            size divides them. Null shards none.
        model_axis_size: size of the model mesh axis: the devices that share each layer's computation.
        replica_ici_axis_size: number of full parameter copies within a slice, which is joined by fast links, ICI on TPUs
            (HSDP).
        replica_dcn_axis_size: number of full parameter copies across TPU slices, which the data-center network (DCN)
            joins, or across processes if there are no slices.
        axis_resources: additional logical-to-mesh axis entries for both the parameter and the compute mapping. Mesh axes
            are replica, data and model.
        parameter_axis_resources: additional entries for the parameter mapping only.
        compute_axis_resources: additional entries for the compute mapping only; they override the other entries.
        mesh: custom mesh axes and axis mappings, instead of the axis sizes. The other axis keys still apply.
        context: context parallelism: devices that share the tokens of each row.
    """

    batch_axis: str | None = field("batch", on_resume="rounding")
    fsdp_axis: str | list[str] | None = field("embed", on_resume="rounding")
    tensor_parallel_axes: str | list[str] | None = field(None, on_resume="rounding")
    model_axis_size: PositiveInt = field(1, on_resume="rounding")
    replica_ici_axis_size: PositiveInt = field(1, on_resume="rounding")
    replica_dcn_axis_size: PositiveInt = field(1, on_resume="rounding")
    axis_resources: dict[str, str | list[str]] = field(default_factory=dict, on_resume="rounding")
    parameter_axis_resources: dict[str, str | list[str]] = field(default_factory=dict, on_resume="rounding")
    compute_axis_resources: dict[str, str | list[str]] = field(default_factory=dict, on_resume="rounding")
    mesh: MeshConfig | None = field(None, on_resume="rounding")
    context: ContextConfig = field(default_factory=ContextConfig, on_resume="rounding")
    key_rules: ClassVar[Rules] = (
        excludes(
            *("model_axis_size", "replica_ici_axis_size", "replica_dcn_axis_size", "context.size"),
            when="mesh",
            why="which sets the sizes of all axes",
        ),
    )


_AxisEntries = Mapping[str, str | list[str]]


def plan_mesh(
    trainer: ShardingConfig,
    axes: Mapping[str, int],
    arrays: Mapping[str, Sequence[str]],
    devices: Sequence[Any],
    rows: Callable[[], Rows],
) -> tuple[MeshShape, Layout, ContextChoice | None, list[str]]:
    """Builds the mesh and the axis mappings, and warns about settings that waste devices or are overridden.

    Args:
        axes: the model's logical axes and their sizes.
        arrays: path of each parameter -> the names of its axes.
        rows: what the run reads; called only if devices share rows.

    Returns:
        Also how devices that share rows divide attention; None if none do.
    """
    size = trainer.context.size or 1
    shape, mappings = _shape(trainer, devices, {CONTEXT: size} if size > 1 else {}), _mappings(trainer)
    layout = make_layout(shape, mappings, axes, devices)
    check_arrays(layout, arrays)
    free, choice = _sharded_axes(layout.compute.get(POSITION), layout), None
    shared = free or ([CONTEXT] if size > 1 else [])
    _check_context(trainer, layout, is_shared=bool(shared))
    if shared:  # a layout without them says which heads a device has and what joins the devices: these decide
        choice, context, sizes = plan_context(trainer.context, layout, shared, rows(), devices, is_free=bool(free))
        shape = _shape(trainer, devices, sizes)
        layout = make_layout(shape, mappings, axes, devices, context)
        check_arrays(layout, arrays)
    notes = indivisible_vocabulary(layout, axes.get(VOCAB))
    return shape, layout, choice, [*_overridden(trainer, layout), *check_axes_used(layout, shape), *notes]


def _check_context(trainer: ShardingConfig, layout: Layout, *, is_shared: bool) -> None:
    """Raises `ConfigError` for keys of `trainer.context` that other keys contradict, or leave without effect."""
    context, key = trainer.context, "trainer.context"
    mapped = layout.compute.get(POSITION)
    if context.size is not None and mapped is not None:
        raise ConfigError(
            f"{key}.size: {context.size} given, but position is mapped to {mapped}. Remove the size, or that mapping"
        )
    for name in ("method", "balance", "heads_size"):
        if not is_shared and (value := getattr(context, name)) != getattr(ContextConfig(), name):
            raise ConfigError(
                f"{key}.{name}: {value} given, but no devices share the tokens of a row. Set {key}.size to 2 or more, or"
                f" remove {name}"
            )


def check_phase(layout: Layout, model: LanguageModel, phase: str) -> None:
    """Raises `ConfigError` if the devices cannot divide the model of a phase. The model before its surgeries has been checked
    by `make_layout`. Args: model: of shapes."""
    check_expert_sharding(model, layout)
    check_context(model, layout, f"phase '{phase}'")
    # Of a stored weight, what does not divide (blocks of scales, bytes of codes) is on every device.
    stored = dict(tree.modules_by_path(model, StoredWeight))
    inside = tuple(f"{path}." for path in stored)
    plain = {path: leaf for path, leaf in tree.leaves(model) if tree.is_named(leaf) and not path.startswith(inside)}
    for path, axes in ((path, weight.axes) for path, weight in (plain | stored).items()):
        for mapping in (layout.parameter, layout.compute):
            for axis, entry in zip(axes, spec_of(axes, mapping), strict=True):
                num_devices = math.prod(layout.mesh.shape[name] for name in axis_names(entry))
                if axis.name != VOCAB and axis.size % num_devices:
                    raise ConfigError(
                        f"phase '{phase}': after its surgery, the axis '{axis.name}' of {path} has {axis.size} entries, which"
                        f" do not divide over the {num_devices} devices that trainer maps it to. Change the surgery (cut the"
                        f" layers elsewhere), or do not map '{axis.name}'"
                    )


def _shape(trainer: ShardingConfig, devices: Sequence[Any], context: Mapping[str, int]) -> MeshShape:
    if trainer.mesh is None:
        groups = count_groups(devices, group_by_process=trainer.replica_dcn_axis_size > 1)
        return mesh_shape(
            len(devices),
            replica=trainer.replica_ici_axis_size,
            model=trainer.model_axis_size,
            replica_dcn=trainer.replica_dcn_axis_size,
            num_groups=groups,
            context=context,
        )
    return trainer.mesh.shape(len(devices), count_groups(devices, group_by_process=trainer.mesh.spans_groups))


def _mappings(trainer: ShardingConfig) -> AxisMappings:
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


def _overridden(trainer: ShardingConfig, layout: Layout) -> list[str]:
    """Warnings about entries that other keys override with an effect on this mesh."""
    warnings = []
    for key, written, mapping in (
        ("axis_resources", trainer.axis_resources, layout.compute),
        ("parameter_axis_resources", trainer.parameter_axis_resources, layout.parameter),
    ):
        for axis, target in written.items():
            requested, actual = (_sharded_axes(names, layout) for names in (target, mapping[axis]))
            if requested != actual and axis not in trainer.compute_axis_resources:
                by = "batch_axis" if axis == trainer.batch_axis else "tensor_parallel_axes, fsdp_axis or trainer.mesh"
                warnings.append(
                    f"trainer.{key}.{axis}: {target} is overridden by {by}: '{axis}' is mapped to {mapping[axis]}"
                )
    return warnings


def _sharded_axes(names: str | Sequence[str] | None, layout: Layout) -> list[str]:
    """The mesh axes among `names` that have more than one device."""
    return [name for name in axis_names(names) if layout.mesh.shape[name] > 1]
