"""How long transfers between groups of devices take."""

import pytest

from jaxlm.core.mesh import MeshShape
from jaxlm.hardware.hlo import Collective, Group
from jaxlm.hardware.topologies import parse_topology
from jaxlm.systems.forecast.roofline import collective_seconds, communication_seconds


def test_links_are_those_of_the_group():
    """Eight neighbors have NVLink; devices eight apart are in other machines."""
    topology, mesh = parse_topology("h100-64"), MeshShape({"replica": 1, "data": 64, "model": 1})
    one = lambda kind, group: collective_seconds(Collective(kind, "f32", (900,)), group, topology, mesh)  # noqa: E731
    inside, outside = 3600 / 450e9, 3600 / 50e9
    assert one("all-to-all", Group(8, 8)) == pytest.approx(inside * 7 / 8)
    assert one("all-to-all", Group(8, 57)) == pytest.approx(outside * 7 / 8)
    assert one("all-gather", None) == pytest.approx(outside * 63 / 64)
    assert one("reduce-scatter", Group(8, 8)) == pytest.approx(inside * 7)
    assert one("collective-permute", Group(64, 9)) == pytest.approx(outside)
    text = """HloModule m

ENTRY %main (x: f32[900]) -> f32[900] {
  %x = f32[900]{0} parameter(0)
  ROOT %y = f32[900]{0} all-reduce(%x), replica_groups=[8,8]<=[64], to_apply=%add
}
"""
    assert communication_seconds(text, topology, mesh) == pytest.approx(2 * inside * 7 / 8)
