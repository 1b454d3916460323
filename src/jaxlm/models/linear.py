"""Linear layers between named axes."""

import dataclasses
from typing import Any

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
from haliax import Axis, AxisSpec, NamedArray
from jax.sharding import PartitionSpec

from jaxlm.core.axes import EXPERTS, axes_of
from jaxlm.core.parameters import VECTOR, DeclaresParameters, Parameter, matrix
from jaxlm.core.products.float32_sums import shifted
from jaxlm.core.products.fp8 import Fp8
from jaxlm.core.products.matmul import arranged, array_specs, dot, operand
from jaxlm.core.products.stored_weights import StoredArray, Weight

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


class ExpertMatrices(eqx.Module):
    """The arrays of one linear layer per expert, without axis names; on each device, its part of them.

    Attributes:
        weight_EIO: {experts, In, Out}.
        bias_EO: {experts, Out}.
    """

    weight_EIO: jax.Array | StoredArray
    bias_EO: jax.Array | None

    def dot(
        self,
        x_PI: jax.Array,
        grouping: Any,
        products: str,
        *,
        share_P1: jax.Array | None = None,
        any_rest: bool = False,
        any_gradient: bool = False,
    ) -> jax.Array:
        """Applies its expert's layer to each row.

        Args:
            grouping: which rows are whose (`Grouping`).
            products: how they are multiplied, as in `Grouping.dot`.
            share_P1: factors of the biases of rows; None for 1.
            any_rest, any_gradient: rows of no expert, and their gradients, may be anything.
        """
        out_PO = grouping.dot(x_PI, self.weight_EIO, products, any_rest=any_rest, any_gradient=any_gradient)
        return grouping.shifted(out_PO, self.bias_EO, share_P1)

    def once(self, sharding: Any) -> "ExpertMatrices":
        """With biases on one of the devices that have slices of the inputs. Args: sharding: `ExpertSharding`."""
        return dataclasses.replace(self, bias_EO=sharding.once(self.bias_EO))

    def specs(self, spec: PartitionSpec) -> Any:
        """The partition specs of its arrays, given that of the weight."""
        bias = None if self.bias_EO is None else PartitionSpec(spec[0], spec[2])
        return ExpertMatrices(array_specs(self.weight_EIO, spec), bias)  # pyright: ignore[reportArgumentType]


class AdaptedMatrices(eqx.Module):
    """`ExpertMatrices` with low-rank adapters: W + B A.

    Attributes:
        base: those without.
        a_EIL, b_ELO: {experts, In, rank} and {experts, rank, Out}.
    """

    base: ExpertMatrices
    a_EIL: jax.Array
    b_ELO: jax.Array

    @property
    def weight_EIO(self) -> jax.Array | StoredArray:
        return self.base.weight_EIO

    def dot(self, x_PI: jax.Array, grouping: Any, products: str, **options: Any) -> jax.Array:
        """As `ExpertMatrices.dot`. If devices have slices of the inputs, the sum over them is still to be taken."""
        out_PO = self.base.dot(x_PI, grouping, products, **options)
        return (out_PO + grouping.dot(grouping.dot(x_PI, self.a_EIL), self.b_ELO)).astype(out_PO.dtype)

    def once(self, sharding: Any) -> "AdaptedMatrices":
        return dataclasses.replace(self, base=self.base.once(sharding))

    def specs(self, spec: PartitionSpec) -> Any:
        experts, inputs, outputs = spec
        low = PartitionSpec(experts, inputs, None), PartitionSpec(experts, None, outputs)
        return AdaptedMatrices(self.base.specs(spec), *low)  # pyright: ignore[reportArgumentType]


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

    def matrices(self) -> ExpertMatrices:
        """The arrays that grouped products read."""
        bias_EO = None if self.bias is None else self.bias.rearrange((EXPERTS, self.Out.name)).array
        return ExpertMatrices(arranged(self.weight, (EXPERTS, self.In.name, self.Out.name)), bias_EO)

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": matrix([self.Out], [self.In]), "bias": VECTOR}
