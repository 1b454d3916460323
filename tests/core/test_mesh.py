"""Mesh shapes, the order of devices, and the sharding of arrays."""

from dataclasses import dataclass

import haliax as hax
import pytest
from jax.sharding import PartitionSpec

from jaxlm.core.errors import ConfigError
from jaxlm.core.mesh import MeshConfig, MeshShape, count_groups, mesh_shape
from jaxlm.core.sharding import spec_of


@dataclass(frozen=True)
class Device:
    """The attributes of a device that the mesh uses."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "cpu"


def test_mesh_sizes_use_all_devices():
    assert mesh_shape(8, replica=2, model=2).sizes == {"replica": 2, "data": 2, "model": 2}
    two_slices = mesh_shape(16, replica=2, model=2, replica_dcn=2, num_groups=2)
    assert two_slices.sizes == {"replica": 4, "data": 2, "model": 2}
    assert mesh_shape(16, model=2, num_groups=2).sizes == {"replica": 1, "data": 8, "model": 2}
    with pytest.raises(ConfigError, match=r"replica_dcn_axis_size: 3 given.*2 slices.*Allowed: 1, 2"):
        mesh_shape(8, replica_dcn=3, num_groups=2)


def test_a_mesh_with_custom_axes():
    assert MeshConfig({"data": -1, "context": 2, "model": 2}).shape(16, 1).sizes == {
        "replica": 1,
        "data": 4,
        "context": 2,
        "model": 2,
    }
    assert MeshConfig({"model": 2}).shape(8, 1).sizes == {"replica": 1, "data": 4, "model": 2}
    assert MeshConfig({"model": -1, "context": 2}).shape(8, 1).sizes["data"] == 1
    batch = {"batch": ["replica_dcn", "replica", "data"]}
    mapped = MeshConfig({"model": 2}, compute_mapping=batch)
    assert mapped.shape(8, 1).sizes == {"replica_dcn": 1, "replica": 1, "data": 4, "model": 2}
    assert mapped.shape(8, 2).sizes == {"replica_dcn": 2, "replica": 1, "data": 2, "model": 2}
    across = MeshConfig({"data": -1}, dcn_axes={"replica_dcn": -1}).shape(8, 4)
    assert across.sizes == {"replica_dcn": 4, "replica": 1, "model": 1, "data": 2}
    assert MeshConfig({"data": 4}).shape(8, 2).sizes["data"] == 8


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"data": 3, "model": -1}, "multiply to 3.*8 devices"),
        ({"data": 2, "model": 2}, "multiply to 4.*Set one of the sizes to -1"),
        ({"data": -1, "model": -1}, "at most one may be -1"),
        ({"data": 0}, "sizes must be 1 or more"),
    ],
)
def test_mesh_sizes_that_do_not_match_the_devices_are_refused(axes, named):
    with pytest.raises(ConfigError, match=named):
        MeshConfig(axes).shape(8, 1)


def test_devices_of_a_slice_are_adjacent():
    """Two slices of four: model and the inner part of data stay inside a slice; the outer part of data and replica cross."""
    devices = [Device(id=n, process_index=0, slice_index=n % 2, platform="tpu") for n in range(8)]
    assert count_groups(devices, group_by_process=False) == 2
    for shape, crossing in (
        (mesh_shape(8, model=2, num_groups=2), "data"),
        (mesh_shape(8, model=2, replica_dcn=2, num_groups=2), "replica"),
        (MeshShape({"data": 2, "model": 2}, {"replica_dcn": 2}), "replica_dcn"),
    ):
        names = list(shape.sizes)
        grid = shape.arrange(devices)
        assert sorted(device.id for device in grid.ravel()) == list(range(8))
        halves = grid.reshape([*grid.shape[: names.index(crossing)], 2, -1])
        for half in range(2):
            part = halves.take(half, axis=names.index(crossing)).ravel()
            assert len({device.slice_index for device in part}) == 1


def test_processes_form_slices_only_on_request():
    devices = [Device(id=n, process_index=n // 4) for n in range(8)]
    assert count_groups(devices, group_by_process=False) == 1
    assert count_groups(devices, group_by_process=True) == 2


def test_if_two_axes_map_to_one_mesh_axis_the_first_in_the_mapping_wins():
    Embed, Mlp = hax.Axis("embed", 8), hax.Axis("mlp", 16)
    mapping = {"embed": "data", "mlp": ("data", "model")}
    assert spec_of((Mlp, Embed), mapping) == PartitionSpec("model", "data")
    assert spec_of((Mlp,), mapping) == PartitionSpec(("data", "model"))
    assert spec_of((hax.Axis("other", 3),), mapping) == PartitionSpec(None)
