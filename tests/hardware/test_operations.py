import jax
import jax.numpy as jnp
import pytest

from jaxlm.hardware.hlo import (
    ATTENTION,
    COLLECTIVE,
    CONTAINERS,
    COPY,
    FUSION,
    KINDS,
    MATRIX,
    OTHER,
    operation_by_name,
    operations,
)

HLO = """HloModule jit_step

%fused_dot (param_0: f32[8,8], param_1: f32[8,8]) -> f32[8,8] {
  %param_0 = f32[8,8]{1,0} parameter(0)
  %param_1 = f32[8,8]{1,0} parameter(1)
  ROOT %dot.9 = f32[8,8]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_move (param_0.1: f32[8,8]) -> f32[8,8] {
  %param_0.1 = f32[8,8]{1,0} parameter(0)
  ROOT %transpose.1 = f32[8,8]{0,1} transpose(%param_0.1), dimensions={1,0}
}

%fused_add (param_0.2: f32[8,8]) -> f32[8,8] {
  %param_0.2 = f32[8,8]{1,0} parameter(0)
  %broadcast.1 = f32[8,8]{1,0} broadcast(%param_0.2), dimensions={0,1}
  ROOT %add.1 = f32[8,8]{1,0} add(%param_0.2, %broadcast.1)
}

ENTRY %main (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0:T(8,128)} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %fusion.1 = f32[8,8]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused_dot, metadata={op_name="jit(step)/mlp/dot_general"}
  %fusion.2 = f32[8,8]{1,0} fusion(%a), kind=kLoop, calls=%fused_move
  %fusion.3 = f32[8,8]{1,0} fusion(%a), kind=kLoop, calls=%fused_add
  %fusion.4 = f32[8,8]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused_dot, metadata={op_name="jvp(attention)/dot"}
  %gemm = (f32[8,8]{1,0}, s8[4]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul"
  %fmha = (f32[8,8]{1,0}, s8[4]{0}) custom-call(%a, %b), custom_call_target="__cudnn$fmhaSoftmax"
  %all-gather-start.1 = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%a), dimensions={0}
  %sort.1 = f32[8,8]{1,0} sort(%a), dimensions={0}, to_apply=%compare
  ROOT %copy.1 = f32[8,8]{1,0} copy(%b)
}
"""


def test_fusions_are_classified_by_content_and_attention_by_name():
    found = operations(HLO)
    kinds = {name: found[name].kind for name in ("fusion.1", "fusion.2", "fusion.3", "fusion.4", "gemm", "fmha")}
    assert list(kinds.values()) == [MATRIX, COPY, FUSION, ATTENTION, MATRIX, ATTENTION]
    assert [found[name].kind for name in ("all-gather-start.1", "copy.1", "sort.1")] == [COLLECTIVE, COPY, OTHER]
    assert found["fusion.1"].source == "jit(step)/mlp/dot_general"


def test_classifies_a_program_of_the_installed_jax():
    @jax.named_scope("attention")
    def weigh(x, y):
        return jax.nn.softmax(x @ y) @ y

    program = jax.jit(jax.grad(lambda x, y: jnp.tanh(weigh(x, y) @ y).sum())).lower(*[jnp.ones((64, 64))] * 2).compile()
    found = operations(program.as_text())
    assert {operation.kind for operation in found.values()} <= set(KINDS)
    kinds = [operation.kind for operation in found.values() if "dot_general" in operation.source]
    assert ATTENTION in kinds
    assert MATRIX in kinds


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_tn_n", MATRIX),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", ATTENTION),
        ("ncclDevKernel_AllGather_RING_LL", COLLECTIVE),
        ("all-reduce.3", COLLECTIVE),
        ("MemcpyD2D", COPY),
        ("input_reduce_fusion_4", FUSION),
        ("something", OTHER),
    ],
)
def test_operations_are_classified_by_name(name, kind):
    assert operation_by_name(name).kind == kind


def test_containers_of_other_operations():
    assert [bool(CONTAINERS.match(n)) for n in ("while.12", "while", "call.3", "callable_fusion", "while_fusion")] == [
        *(True, True, True),
        *(False, False),
    ]
