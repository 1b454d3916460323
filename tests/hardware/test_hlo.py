"""Reading compiled programs: operations in loops are multiplied by the trip count."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxlm.hardware.hlo import Collective, collectives_by_kind, collectives_per_run, has_compiler_remat, kernels
from tests.hardware.helpers import collectives


def program(turns: int) -> str:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    def nested(x):
        def inner(x, _):
            return jax.lax.psum(x, "data") * 0.5 + x, None

        def outer(x, _):
            x, _ = jax.lax.scan(inner, x, None, length=turns)
            return x + jax.lax.all_gather(x, "data").sum(0), None

        return jax.lax.scan(outer, x, None, length=3)[0]

    return nested.lower(jnp.ones((16, 4))).compile().as_text()


def test_collectives_of_nested_loops():
    text = program(turns=5)
    added = Collective("all-reduce", "f32", (2, 4))
    assert collectives(text)[added] == 1
    executed = collectives_per_run(text)
    assert executed[added] == 15
    assert sum(n for c, n in executed.items() if c.kind == "all-gather") == 3
    assert added.num_bytes == 32
    assert collectives_by_kind(text) == {"all-reduce": (15, 15 * 32), "all-gather": (3, 3 * 8 * 32)}


def test_kernels_are_library_calls():
    text = """HloModule m

%body (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %c = f32[4]{0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %s = f32[4]{0} custom-call(%p), custom_call_target="Sharding"
  ROOT %w = f32[4]{0} while(%s), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"12"}}
}
"""
    assert kernels(text) == {"__cudnn$fmhaSoftmax": 12}


def test_of_two_branches_the_one_with_known_turns_is_executed():
    """A ring that takes one kernel for a single document, and another with loops over blocks for several."""
    text = """HloModule m

%again (x: f32[4]) -> pred[] {
  %x = f32[4]{0} parameter(0)
  ROOT %more = pred[] constant(true)
}

%turn (x.1: f32[4]) -> f32[4] {
  %x.1 = f32[4]{0} parameter(0)
  ROOT %q = f32[4]{0} collective-permute(%x.1), source_target_pairs={{0,1},{1,0}}
}

%several (x.2: f32[4]) -> f32[4] {
  %x.2 = f32[4]{0} parameter(0)
  %p = f32[4]{0} collective-permute(%x.2), source_target_pairs={{0,1},{1,0}}
  ROOT %loop = f32[4]{0} while(%p), condition=%again, body=%turn
}

%single (x.3: f32[4]) -> f32[4] {
  %x.3 = f32[4]{0} parameter(0)
  %k = f32[4]{0} collective-permute(%x.3), source_target_pairs={{0,1},{1,0}}
  ROOT %c = f32[4]{0} custom-call(%k), custom_call_target="__cudnn$fmhaSoftmax"
}

ENTRY %main (p: pred[], x.4: f32[4]) -> f32[4] {
  %p = pred[] parameter(0)
  %x.4 = f32[4]{0} parameter(1)
  ROOT %which = f32[4]{0} conditional(%p, %x.4, %x.4), true_computation=%single, false_computation=%several
}
"""
    assert collectives_by_kind(text) == {"collective-permute": (1, 16)}
    assert kernels(text) == {"__cudnn$fmhaSoftmax": 1}
    neither = text.replace("true_computation=%single", "true_computation=%several")
    assert collectives_by_kind(neither)["collective-permute"] == (2, 32)
    both = text.replace("false_computation=%several", "false_computation=%single")
    assert kernels(both) == {"__cudnn$fmhaSoftmax": 1}
    both = text.replace("while(%p), condition=%again, body=%turn", "negate(%p)")
    longer = both.replace("ROOT %loop", "%more = f32[4]{0} negate(%p)\n  ROOT %loop")
    assert kernels(longer) == {}, "the longer one"


def test_asynchronous_collectives_count_their_output():
    text = """HloModule m

ENTRY %main (x: f32[8]) -> f32[64] {
  %g = (f32[2,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%x), dimensions={0}
  %r = (f32[1000]{0}, f32[3000]{0}) all-reduce-start(%x, %y), to_apply=%add
  %s = ((f32[80]{0}, bf16[16,8]{1,0}), (f32[10]{0}, bf16[2,8]{1,0})) reduce-scatter-start(%x, %y), to_apply=%add
  %a = ((f32[48]{0}), f32[48]{0}) all-to-all-start(%x), dimensions={0}
  %p = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}
  %q = ((f32[65]{0}, s32[7]{0}), (f32[65]{0}, s32[7]{0})) collective-permute-start(%x, %y), source_target_pairs={{0,1}}
}
"""
    assert collectives(text) == {
        Collective("all-gather", "f32", (16, 8)): 1,
        Collective("all-reduce", "f32", (1000,)): 1,
        Collective("all-reduce", "f32", (3000,)): 1,
        Collective("reduce-scatter", "f32", (10,)): 1,
        Collective("reduce-scatter", "bf16", (2, 8)): 1,
        Collective("all-to-all", "f32", (48,)): 1,
        Collective("collective-permute", "f32", (64,)): 1,
        Collective("collective-permute", "f32", (65,)): 1,
        Collective("collective-permute", "s32", (7,)): 1,
    }


def test_trip_counts_are_read_from_the_condition_if_not_annotated():
    text = """HloModule m

%all-reduce-scatter.1 (input: bf16[32,8]) -> bf16[32,2] {
  %input = bf16[32,8]{1,0} parameter(0)
  %all-reduce.9 = bf16[32,8]{1,0} all-reduce(%input), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %cut = bf16[32,2]{1,0} dynamic-slice(%all-reduce.9), dynamic_slice_sizes={32,2}
}

%cond (c: (s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(80)
  %c = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (b: (s32[])) -> (s32[]) {
  %b = (s32[]) parameter(0)
  %g = bf16[1,16]{1,0:T(2,128)(2,1)} all-gather(%b), dimensions={0}
  ROOT %f = bf16[32,2]{1,0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1
}

ENTRY %main (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  ROOT %w = (s32[]) while(%p), condition=%cond, body=%body
}
"""
    assert collectives_per_run(text) == {
        Collective("all-gather", "bf16", (1, 16)): 80,
        Collective("reduce-scatter", "bf16", (32, 2)): 80,
    }


def test_compiler_remat_is_detected():
    line = "  %gemm_fusion_dot.285{} = bf16[64,64]{{1,0}} fusion(%a), kind=kCustom, calls=%c\n"
    assert not has_compiler_remat(line.format(""))
    assert all(has_compiler_remat(line.format(mark)) for mark in (".remat", ".remat2", ".remat.1"))


def test_products_in_fp8_are_counted_in_fusions_and_libraries():
    text = """HloModule m

%product (a: f8e5m2[8,4], b: f8e4m3fn[4,16]) -> bf16[8,16] {
  %a = f8e5m2[8,4]{1,0} parameter(0)
  %b = f8e4m3fn[4,16]{1,0} parameter(1)
  ROOT %d = bf16[8,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f8e5m2[8,4], y: f8e4m3fn[4,16], z: bf16[4,16]) -> bf16[8,16] {
  %x = f8e5m2[8,4]{1,0} parameter(0)
  %y = f8e4m3fn[4,16]{1,0} parameter(1)
  %z = bf16[4,16]{1,0} parameter(2)
  %wide = bf16[8,4]{1,0} convert(%x)
  %plain = bf16[8,16]{1,0} dot(%wide, %z), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %call = bf16[8,16]{1,0} custom-call(%x, %y), custom_call_target="__cublas$lt$matmul$f8"
  ROOT %fused = bf16[8,16]{1,0} fusion(%x, %y), kind=kCustom, calls=%product
}
"""
    assert kernels(text) == {"fp8 products": 2, "__cublas$lt$matmul$f8": 1}


@pytest.mark.parametrize(
    "start",
    [
        "((bf16[512,8192]{1,0}, token[]), bf16[4096,8192]{1,0}) call-start(%p), to_apply=%offloaded.4",
        '((), (), (s32[8]{0})) custom-call-start(), custom_call_target="unnamed", called_computations={%offloaded.4}',
    ],
)
def test_collectives_that_a_tpu_offloads_are_in_computations_of_their_own(start):
    """As libtpu writes them for TPU7x, 0.0.42 and 0.0.52."""
    program = f"""\
%offloaded.4 (param_0.60: bf16[512,8192]) -> bf16[4096,8192] {{
  %param_0.60 = bf16[512,8192]{{1,0}} parameter(0)
  ROOT %all-gather.9 = bf16[4096,8192]{{1,0}} all-gather(%param_0.60), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
}}

ENTRY %main.1 (p: bf16[512,8192]) -> bf16[4096,8192] {{
  %p = bf16[512,8192]{{1,0}} parameter(0)
  %all-gather.start = {start}
  ROOT %done = bf16[4096,8192]{{1,0}} custom-call-done(%all-gather.start)
}}
"""
    assert collectives_by_kind(program) == {"all-gather": (1, 4096 * 8192 * 2)}
