"""Groups of devices as XLA writes them, against lists by hand and those that jax compiles."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxlm.hardware.hlo import Group, Program, group_of, transfers


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("all-to-all(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}", Group(4, 4)),
        ("all-reduce(%x), replica_groups={{0,8,16},{1,9,17}}, to_apply=%add", Group(3, 17)),
        ("all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}", Group(4, 4)),
        ("all-gather(%x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", Group(2, 5)),
        ("reduce-scatter(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}", Group(4, 4)),
        ("reduce-scatter(%x), replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={0}", Group(2, 5)),
        ("reduce-scatter(%x), replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}, dimensions={0}", Group(4, 6)),
        ("collective-permute(%x), source_target_pairs={{0,8},{8,16},{16,0}}", Group(3, 17)),
        ("all-reduce(%x), replica_groups={}, to_apply=%add", None),
        ("all-reduce(%x), replica_groups=mesh['a'=8] {'a':(1)2}, to_apply=%add", None),
    ],
)
def test_groups_are_read_in_every_form(text, group):
    assert group_of(f"  %y = f32[8]{{0}} {text}") == group


def test_groups_of_compiled_programs():
    mesh = jax.make_mesh((2, 4), ("far", "near"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=PartitionSpec(("far", "near")), out_specs=PartitionSpec(("far", "near")))
    def run(x):
        gathered = jax.lax.all_gather(x, "near").sum(0) + jax.lax.psum(x, "far")
        return jax.lax.ppermute(gathered, "far", [(0, 1), (1, 0)])

    program = Program.parse(run.lower(jnp.ones((16, 4))).compile().as_text())
    found = {collective.kind: group for collective, group, _ in transfers(program)}
    assert found == {"all-gather": Group(4, 4), "all-reduce": Group(2, 5), "collective-permute": Group(8, 5)}
