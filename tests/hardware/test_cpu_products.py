"""What computes the products of a program for CPUs, as compilers write them."""

import jax
import jax.numpy as jnp
import pytest

from jaxlm.hardware.cpu_products import CpuProduct, cpu_products, shares_by_library, shares_without_library

TEXT = """HloModule m

%ynn (a: bf16[64,32], b: bf16[32,16]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  ROOT %p = bf16[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%turn (t: (f32[8,64], f32[8,16])) -> (f32[8,64], f32[8,16]) {
  %t = (f32[8,64]{1,0}, f32[8,16]{1,0}) parameter(0)
  %x = f32[8,64]{1,0} get-tuple-element(%t), index=0
  %y = f32[8,16]{1,0} get-tuple-element(%t), index=1
  %d = f32[64,16]{1,0} dot(%x, %y), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT %r = (f32[8,64]{1,0}, f32[8,16]{1,0}) tuple(%x, %y)
}

%again (t: (f32[8,64], f32[8,16])) -> pred[] {
  %t = (f32[8,64]{1,0}, f32[8,16]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (a: bf16[64,32], b: bf16[32,16], x: f32[8,64], y: f32[8,16]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  %x = f32[8,64]{1,0} parameter(2)
  %y = f32[8,16]{1,0} parameter(3)
  %t = (f32[8,64]{1,0}, f32[8,16]{1,0}) tuple(%x, %y)
  %w = (f32[8,64]{1,0}, f32[8,16]{1,0}) while(%t), condition=%again, body=%turn, backend_config={"known_trip_count":{"n":"4"}}
  %o = f32[64,16]{1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul"
  ROOT %f = bf16[64,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%ynn, backend_config={"kind":"__ynn_fusion"}
}
"""


def test_products_of_libraries_and_of_xla_are_told_apart():
    found = cpu_products(TEXT)
    once = 2.0 * 64 * 32 * 16
    in_a_loop = 4 * 2.0 * 64 * 16 * 8
    assert found == {
        CpuProduct("YNNPACK", "bf16 x bf16", "bf16[64,16]"): once,
        CpuProduct("oneDNN", "bf16 x bf16", "f32[64,16]"): once,
        CpuProduct("Eigen", "f32 x f32", "f32[64,16]", transposed=True): in_a_loop,
    }
    assert shares_by_library(found) == pytest.approx({"YNNPACK bf16": 1 / 3, "oneDNN bf16": 1 / 3, "Eigen f32": 1 / 3})
    (own,) = shares_without_library(found)
    assert own == "f32[64,16] of f32 x f32, left operand transposed"


def test_this_compiler_multiplies_in_a_library_or_says_so():
    """Whatever it does, the FLOPs are those of the product, and the dtype is that of its operands."""
    rows, inner, columns = 256, 128, 512
    shapes = jax.ShapeDtypeStruct((rows, inner), jnp.float32), jax.ShapeDtypeStruct((inner, columns), jnp.float32)
    text = jax.jit(lambda a, b: jnp.exp(a) @ b).lower(*shapes).compile().as_text()
    ((product, flops),) = cpu_products(text).items()
    assert flops == 2.0 * rows * inner * columns
    assert (product.operands, product.output) == ("f32 x f32", f"f32[{rows},{columns}]")
    assert cpu_products(jax.jit(lambda a: a + 1).lower(shapes[0]).compile().as_text()) == {}
