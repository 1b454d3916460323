"""What computes the matrix products of a program compiled for CPUs, and in which dtype.

XLA hands a product to a library, as a fusion (YNNPACK: `__ynn_fusion`) or as a call (oneDNN: `__onednn$matmul`), or computes
it with its own runtime (Eigen). Only some of these use a processor's instructions for bfloat16. Which it is depends on dtype,
shape and layout, and on the version of jaxlib, so it is read from the compiled program.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxlm.hardware.hlo import Computation, Instruction, Program

EIGEN = "Eigen"
_LIBRARIES = {"__ynn_fusion": "YNNPACK", "__xnn_fusion": "XNNPACK", "__onednn_fusion": "oneDNN"}
_CALLS = {"__onednn$matmul": "oneDNN"}
_FUSION_KIND = re.compile(r'"kind": ?"(\w+)"')


@dataclass(frozen=True)
class CpuProduct:
    """Matrix products of one kind.

    Attributes:
        library: what computes them.
        operands: their dtypes, as `bf16 x bf16`.
        output: dtype and shape of the result, as `f32[4096,128]`.
        transposed: whether the sum runs over the first axis of the left operand, so that it is read by columns.
    """

    library: str
    operands: str
    output: str
    transposed: bool = False

    def __str__(self) -> str:
        return f"{self.output} of {self.operands}{', left operand transposed' if self.transposed else ''}"


def cpu_products(hlo: str) -> dict[CpuProduct, float]:
    """FLOPs of the products in one run of a program for CPUs, those with the most FLOPs first."""
    program, flops = Program.parse(hlo), dict[CpuProduct, float]()
    libraries = _libraries(program)
    for name, count in program.executed():
        body = program.computations[name]
        for instruction in body.values():
            library = _CALLS.get(instruction.library_call)
            if library or instruction.opcode == "dot":
                product, each = _product(instruction, body, library or libraries.get(name, EIGEN))
                flops[product] = flops.get(product, 0.0) + count * each
    return dict(sorted(flops.items(), key=lambda item: -item[1]))


def shares_by_library(products: Mapping[CpuProduct, float]) -> dict[str, float]:
    """Library and dtype, as `YNNPACK bf16` -> share of the FLOPs of all products, the largest first."""
    total, shares = sum(products.values()), dict[str, float]()
    for product, flops in products.items():
        kind = f"{product.library} {product.operands.partition(' ')[0]}"
        shares[kind] = shares.get(kind, 0.0) + flops / total
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def shares_without_library(products: Mapping[CpuProduct, float]) -> dict[str, float]:
    """Products that no library computes -> share of the FLOPs of all products, the largest first."""
    total = sum(products.values())
    return {str(product): flops / total for product, flops in products.items() if product.library == EIGEN}


def _libraries(program: Program) -> dict[str, str]:
    """The computations that libraries run as one fusion -> the library."""
    libraries = {}
    for fusion in (i for body in program.computations.values() for i in body.values() if i.opcode == "fusion"):
        if kind := _FUSION_KIND.search(fusion.line):
            name = _LIBRARIES.get(kind[1], kind[1])
            libraries |= dict.fromkeys(program.called_by(fusion), name)
    return libraries


def _product(dot: Instruction, body: Computation, library: str) -> tuple[CpuProduct, float]:
    """The product, and the FLOPs of one run of it."""
    (left_dtype, left), (right_dtype, _) = (body[name].outputs[0] for name in dot.operands[:2])
    axes = (len(left) - 1,) if dot.summed_axes is None else dot.summed_axes
    dtype, shape = dot.outputs[0]
    product = CpuProduct(
        library,
        f"{left_dtype} x {right_dtype}",
        f"{dtype}[{','.join(map(str, shape))}]",
        transposed=0 in axes and len(left) > len(axes),
    )
    return product, 2.0 * math.prod(shape) * math.prod(left[axis] for axis in axes)
