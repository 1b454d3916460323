"""Linear layers between named axes."""

import dataclasses

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
from haliax import Axis, AxisSpec, NamedArray

from jaxlm.core.axes import axes_of
from jaxlm.core.parameters import VECTOR, DeclaresParameters, Parameter, matrix
from jaxlm.core.products.float32_sums import shifted
from jaxlm.core.products.fp8 import Fp8
from jaxlm.core.products.matmul import dot, operand
from jaxlm.core.products.stored_weights import Weight

_FLAT_IN, _FLAT_OUT = "flat_in", "flat_out"


class Linear(DeclaresParameters):
    """A linear layer from {..., *In} to {..., *Out}.

    `haliax.nn.Linear` multiplies its weight by a constant on every call, and the product, as large as the weight, would
    be saved for the backward pass.

    Attributes:
        weight: {*Out, *In}.
        bias: {*Out}.
        fp8: how products are quantized in training; None for not at all.
        float32: the weight, and so the product, is float32 whatever the dtypes of the others are (`Parameter.float32`).
    """

    weight: Weight
    bias: NamedArray | None
    In: AxisSpec = eqx.field(static=True)
    Out: AxisSpec = eqx.field(static=True)
    fp8: Fp8 | None = eqx.field(static=True, default=None)
    float32: bool = eqx.field(static=True, default=False)

    @staticmethod
    def init(In: AxisSpec, Out: AxisSpec, *, std: float, key: jax.Array, use_bias: bool = False) -> "Linear":
        """Initializes N(0, std) weights and, with `use_bias`, zero biases."""
        weight = hax.random.normal(key, hax.concat_axis_specs(Out, In)) * std
        return Linear(weight, hax.zeros(Out) if use_bias else None, In, Out)

    def __call__(self, x: NamedArray) -> NamedArray:
        out = hax.auto_sharded(dot(x, self.weight, self.In, self.fp8))
        return (out if self.bias is None else shifted(out, self.bias)).astype(x.dtype)

    def operand(self, x: NamedArray) -> NamedArray:
        """x in the dtype of this layer's product. Given this, the layer does not round its output to the dtype of x."""
        return operand(x, self.weight)

    def parameters(self) -> dict[str, Parameter]:
        weight = matrix(axes_of(self.Out), axes_of(self.In))
        return {"weight": dataclasses.replace(weight, float32=self.float32), "bias": VECTOR}


class MatrixLinear(eqx.Module):
    """A linear layer that stores its weight as one matrix, because XLA on CPUs copies weights of any other shape.

    Attributes:
        matrix: {flat_out, flat_in}.
        bias: {*Out}.
    """

    matrix: Weight
    bias: NamedArray | None
    In: AxisSpec = eqx.field(static=True)
    Out: AxisSpec = eqx.field(static=True)

    @staticmethod
    def of(linear: Linear) -> "MatrixLinear":
        matrix = linear.weight.flatten_axes(linear.Out, _FLAT_OUT).flatten_axes(linear.In, _FLAT_IN)
        return MatrixLinear(matrix, linear.bias, linear.In, linear.Out)

    @property
    def weight(self) -> Weight:
        """{*Out, *In}."""
        return self.matrix.unflatten_axis(_FLAT_IN, self.In).unflatten_axis(_FLAT_OUT, self.Out)

    def __call__(self, x: NamedArray) -> NamedArray:
        flat = dot(x.flatten_axes(self.In, _FLAT_IN), self.matrix, _FLAT_IN)
        out = flat.unflatten_axis(_FLAT_OUT, self.Out)
        return (out if self.bias is None else shifted(out, self.bias)).astype(x.dtype)

    def operand(self, x: NamedArray) -> NamedArray:
        """As `Linear.operand`."""
        return operand(x, self.matrix)


class ExpertLinear(DeclaresParameters):
    """One linear layer per expert. `jaxlm.models.moe` applies them.

    Attributes:
        weight: {experts, In, Out}, the order that grouped matrix products read.
        bias: {experts, Out}.
    """

    weight: Weight
    In: Axis = eqx.field(static=True)
    Out: Axis = eqx.field(static=True)
    bias: NamedArray | None = None

    @staticmethod
    def init(
        Expert: Axis, In: Axis, Out: Axis, *, std: float, key: jax.Array, use_bias: bool = False
    ) -> "ExpertLinear":
        """Initializes N(0, std) weights and, with `use_bias`, zero biases."""
        bias = hax.zeros((Expert, Out)) if use_bias else None
        return ExpertLinear(hax.random.normal(key, (Expert, In, Out)) * std, In, Out, bias)

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": matrix([self.Out], [self.In]), "bias": VECTOR}
