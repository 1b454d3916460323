"""The matrix product of linear layers, adapters, experts and the head, in whatever form the weight is stored.

A product is computed in the dtype of its weight, so `core/precision.py` selects a product's dtype by casting the weight.
A weight in another form than a floating-point array is a `StoredWeight`, which brings its own product. A layer with an
`Fp8` multiplies in fp8 in training, although its weight is stored as always.

Shapes: G groups, I input features, O output features.
"""

import abc
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, AxisSelection, AxisSpec, NamedArray
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxlm.core.axes import axes_of
from jaxlm.core.devices import cuda_capability
from jaxlm.core.sharding import current_device, current_platform
from jaxlm.core.tracing import CustomVjp, trace_options

_INT8_MAX = 127.0  # symmetric: -128 is not used


class StoredArray(eqx.Module):
    """A `StoredWeight` without axis names, for kernels. Its arrays can be sliced along leading axes of the weight."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""

    @abc.abstractmethod
    def floats(self, dtype) -> jax.Array:
        """The weight as a floating-point array."""

    @abc.abstractmethod
    def einsum(self, subscripts: str, x: jax.Array, dtype) -> jax.Array:
        """`einsum(subscripts, x, self, dtype)`."""


class StoredWeight(eqx.Module):
    """A weight that is not a floating-point array. Precision casts leave it unchanged, and it cannot be trained."""

    @property
    @abc.abstractmethod
    def axes(self) -> tuple[Axis, ...]:
        """Axes of the weight."""

    @abc.abstractmethod
    def dot(self, x: NamedArray, axis: AxisSelection) -> NamedArray:
        """The product with x over `axis`, in the dtype of x."""

    @abc.abstractmethod
    def floats(self, dtype) -> NamedArray:
        """The weight as a floating-point array."""

    @abc.abstractmethod
    def arranged(self, order: tuple[str, ...]) -> StoredArray:
        """The weight without names, with its axes in this order."""

    @abc.abstractmethod
    def flatten_axes(self, old: AxisSpec, new: str) -> "StoredWeight":
        """As `NamedArray.flatten_axes`."""

    @abc.abstractmethod
    def unflatten_axis(self, old: str, new: AxisSpec) -> "StoredWeight":
        """As `NamedArray.unflatten_axis`."""

    def resolve_axis(self, name: str) -> Axis:
        """The axis of this name."""
        return next(axis for axis in self.axes if axis.name == name)

    def axis_size(self, name: str) -> int:
        """The size of the axis of this name."""
        return self.resolve_axis(name).size

    @property
    def size(self) -> int:
        """Number of elements of the weight."""
        return math.prod(axis.size for axis in self.axes)


Weight = NamedArray | StoredWeight


def operand(x, weight):
    """x in the dtype of its product with a weight: that of the weight, or of x if the weight is in another form."""
    return x if isinstance(weight, StoredWeight | StoredArray) else x.astype(weight.dtype)


def dot(x: NamedArray, weight: Weight, axis: AxisSelection, fp8: "Fp8 | None" = None) -> NamedArray:
    """The product of x and a weight over `axis`, in the dtype of `operand`. Args: fp8: how it is quantized in training."""
    if isinstance(weight, StoredWeight):
        return weight.dot(x, axis)
    x = operand(x, weight)
    if fp8 is None or not multiplies_in_fp8():
        return hax.dot(x, weight, axis=axis)
    summed = (axis,) if isinstance(axis, str | Axis) else tuple(axis)
    inputs = tuple(axis if isinstance(axis, str) else axis.name for axis in summed)
    rows, outputs = (tuple(a for a in array.axes if a.name not in inputs) for array in (x, weight))
    x_RI, w_OI = (array.rearrange((*axes, *inputs)).array for array, axes in ((x, rows), (weight, outputs)))
    return NamedArray(fp8_product(x_RI, w_OI, len(inputs), fp8), (*rows, *outputs))


def einsum(subscripts: str, x: jax.Array, weight: jax.Array | StoredArray, dtype=None) -> jax.Array:
    """The product of x and a weight without axis names.

    Args:
        subscripts: as of `jnp.einsum`, with the weight as the second array.
        dtype: dtype of the sums and the result; None means that of `operand`.
    """
    if isinstance(weight, StoredArray):
        return weight.einsum(subscripts, x, dtype)
    return jnp.einsum(subscripts, operand(x, weight), weight, preferred_element_type=dtype)


def arranged(weight: Weight, order: tuple[str, ...]) -> jax.Array | StoredArray:
    """A weight without axis names, with its axes in this order."""
    return weight.arranged(order) if isinstance(weight, StoredWeight) else weight.rearrange(order).array


def array_specs(weight: jax.Array | StoredArray, spec: PartitionSpec) -> Any:
    """The partition specs of the arrays of a weight, given that of the weight."""

    def of_array(array: jax.Array) -> PartitionSpec:
        return PartitionSpec(*(None if size == 1 else e for size, e in zip(array.shape, spec, strict=True)))

    return jax.tree.map(of_array, weight) if isinstance(weight, StoredArray) else spec


def quantize(values: NamedArray, axis: AxisSelection) -> tuple[NamedArray, NamedArray]:
    """Quantizes to int8, with a float32 scale for each vector along `axis`; its largest absolute value becomes 127."""
    exact = values.astype(jnp.float32)
    scale = hax.max(hax.abs(exact), axis) / _INT8_MAX
    rounded = hax.round(exact / hax.where(scale > 0, scale, 1.0))
    return rounded.rearrange(values.axes).astype(jnp.int8), scale


class Int8Weight(StoredWeight):
    """An int8 weight with a float32 scale for each output channel: `values * scale`.

    The scale is the same along everything that a product sums over, so it multiplies the product instead of the weight.
    The integers are exact in all floating-point dtypes.

    Source: symmetric quantization by channel, Krishnamoorthi 2018 (arXiv:1806.08342), section 2; the product is
    multiplied by the scale as in LLM.int8(), Dettmers et al. 2022 (arXiv:2208.07339), section 3.1, without its int8 inputs.

    Attributes:
        values: int8, with the axes of the weight.
        scale: float32, with the axes of the weight except its inputs.
    """

    values: NamedArray
    scale: NamedArray

    @staticmethod
    def of(weight: NamedArray, In: AxisSpec) -> "Int8Weight":
        """Quantizes a weight whose products sum over `In`."""
        return Int8Weight(*quantize(weight, In))

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.values.axes

    def dot(self, x: NamedArray, axis: AxisSelection) -> NamedArray:
        out = hax.dot(x, self.values.astype(x.dtype), axis=axis, preferred_element_type=jnp.float32)
        return (out * self.scale).rearrange(out.axes).astype(x.dtype)

    def floats(self, dtype) -> NamedArray:
        return (self.values * self.scale).rearrange(self.values.axes).astype(dtype)

    def arranged(self, order: tuple[str, ...]) -> "Int8Array":
        values = self.values.rearrange(order)
        summed = tuple(axis for axis in values.axes if not self.scale.has_axis(axis.name))
        kept = self.scale.rearrange(tuple(axis for axis in values.axes if axis not in summed)).array
        return Int8Array(values.array, jnp.expand_dims(kept, tuple(values.axes.index(axis) for axis in summed)))

    def flatten_axes(self, old: AxisSpec, new: str) -> "Int8Weight":
        is_output = all(self.scale.has_axis(axis.name) for axis in axes_of(old))
        scale = self.scale.flatten_axes(old, new) if is_output else self.scale
        return Int8Weight(self.values.flatten_axes(old, new), scale)

    def unflatten_axis(self, old: str, new: AxisSpec) -> "Int8Weight":
        scale = self.scale.unflatten_axis(old, new) if self.scale.has_axis(old) else self.scale
        return Int8Weight(self.values.unflatten_axis(old, new), scale)


class Int8Array(StoredArray):
    """An `Int8Weight` without axis names.

    Attributes:
        values: int8.
        scale: float32, of size 1 along the axes that a product sums over.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def floats(self, dtype) -> jax.Array:
        return (self.values * self.scale).astype(dtype)

    def einsum(self, subscripts: str, x: jax.Array, dtype) -> jax.Array:
        labels, out_labels = subscripts.partition(",")[2].split("->")
        sizes = dict(zip(labels, self.scale.shape, strict=True))
        scale = self.scale.reshape([sizes.get(label, 1) for label in out_labels])
        out = jnp.einsum(subscripts, x, self.values.astype(x.dtype), preferred_element_type=jnp.float32)
        return (out * scale).astype(x.dtype if dtype is None else dtype)


# --- Products in fp8 --------------------------------------------------------------------------------------------------

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
_SMALLEST_MAXIMUM = 1e-12
_FIRST_WITH_FP8 = (8, 9)  # compute capability: Ada; Hopper is (9, 0)
_EXPONENT = np.uint32(0xFF800000)
# Names for remat policies: inputs in fp8, scales, products.
FP8_INPUT, FP8_SCALE, FP8_OUTPUT = "fp8_input", "fp8_scale", "fp8_output"


class Scaled(NamedTuple):
    """An array in fp8: `values / scale`.

    Attributes:
        values: fp8.
        scale: float32, of size 1 along the dimensions that share a scale.
    """

    values: jax.Array
    scale: jax.Array


@dataclass(frozen=True)
class Fp8:
    """How a layer's three products (output, gradient of the inputs, gradient of the weight) are quantized to fp8.

    Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv:2209.05433), section 3: e4m3 for inputs and
    weights, e5m2 for gradients, float32 scales that move the largest absolute value to the largest fp8 number. Scales of
    the current values, not of earlier steps, and the recipe `rowwise` are those of torchao (`torchao.float8`).

    Attributes:
        recipe: `tensorwise` has one scale for each array. `rowwise` has one for each vector that a product sums over. So
            that a product can be divided by its scales afterwards, every array has other scales in each product that
            reads it. They are powers of two, and gradients are e4m3 too, because a row has a smaller range than an array.
    """

    recipe: Literal["tensorwise", "rowwise"]

    @property
    def gradient_dtype(self) -> Any:
        """The fp8 dtype of gradients of outputs."""
        return E4M3 if self.recipe == "rowwise" else E5M2

    def maximum(self, x: jax.Array, summed: Sequence[int]) -> jax.Array:
        """The absolute values that become the largest fp8 number. Args: summed: the dimensions that the product sums over."""
        dims = tuple(summed) if self.recipe == "rowwise" else None
        return jnp.max(jnp.abs(x), axis=dims, keepdims=True).astype(jnp.float32)

    def scale(self, maximum: jax.Array, dtype: Any = E4M3) -> jax.Array:
        """The scale for a maximum."""
        scale = largest_fp8(dtype) / jnp.maximum(maximum, _SMALLEST_MAXIMUM)
        if self.recipe == "rowwise":  # rounds down: clears the mantissa
            bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) & _EXPONENT
            scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return checkpoint_name(scale, FP8_SCALE)

    def quantized(self, x: jax.Array, summed: Sequence[int], dtype: Any = E4M3) -> Scaled:
        """x in fp8, as a product that sums over these dimensions reads it."""
        return to_fp8(x, self.scale(self.maximum(x, summed), dtype), dtype)


def largest_fp8(dtype: Any) -> float:
    """The largest finite number of an fp8 dtype."""
    return float(jnp.finfo(dtype).max)


def to_fp8(x: jax.Array, scale: jax.Array, dtype: Any = E4M3) -> Scaled:
    """Multiplies by the scale, saturates, and rounds. What is not finite becomes NaN, so that the step is skipped."""
    largest = largest_fp8(dtype)
    return Scaled(jnp.clip(x.astype(jnp.float32) * scale, -largest, largest).astype(dtype), scale)


def multiplies_in_fp8() -> bool:
    """Whether layers with an `Fp8` multiply in fp8 in the current trace: in training, for first derivatives."""
    return trace_options().quantized_products and not trace_options().twice_differentiable


def has_fp8_products(device: Any) -> bool:
    """Whether a device multiplies matrices in fp8. On others the same numbers are multiplied in a larger dtype."""
    capability = cuda_capability(device)
    return capability is not None and capability >= _FIRST_WITH_FP8


def scaled_product(
    a: Scaled, b: Scaled, summed_a: Sequence[int], summed_b: Sequence[int], dtype: Any, *, fast: bool = False
) -> jax.Array:
    """The product of two arrays over some of their dimensions; the result has the other dimensions of a, then those of b.

    Args:
        fast: allow a GPU to add up with fewer bits than float32 has.
    """
    x, y = a.values, b.values
    # A float16 sum could overflow before it is divided by the scales.
    sums = jnp.bfloat16 if dtype == jnp.bfloat16 and current_platform() != "cpu" else jnp.float32
    if not has_fp8_products(current_device()):  # exact: both dtypes have more bits
        x, y = (v.astype(jnp.float32 if current_platform() == "cpu" else jnp.bfloat16) for v in (x, y))
    dims = ((tuple(summed_a), tuple(summed_b)), ((), ()))
    precision = jax.lax.Precision.DEFAULT if fast else jax.lax.Precision.HIGHEST
    out = jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=sums)
    inverse_a, inverse_b = 1 / jnp.squeeze(a.scale, summed_a), 1 / jnp.squeeze(b.scale, summed_b)
    inverse = jnp.expand_dims(inverse_a, tuple(range(inverse_a.ndim, out.ndim))) * inverse_b
    return (out.astype(jnp.float32) * inverse).astype(dtype)


@functools.partial(CustomVjp, nondiff_argnums=(2, 3))
def fp8_product(x_RI: jax.Array, w_OI: jax.Array, num_inputs: int, fp8: Fp8) -> jax.Array:
    """The product of [rows, inputs] and [outputs, inputs], each one or several dimensions. Args: num_inputs: how many."""
    return _fp8_forward(x_RI, w_OI, num_inputs, fp8)[0]


def _fp8_forward(x_RI, w_OI, num_inputs, fp8):
    x_inputs, w_inputs = (tuple(range(a.ndim - num_inputs, a.ndim)) for a in (x_RI, w_OI))
    x, w = fp8.quantized(x_RI, x_inputs), fp8.quantized(w_OI, w_inputs)
    out = checkpoint_name(scaled_product(x, w, x_inputs, w_inputs, x_RI.dtype, fast=True), FP8_OUTPUT)
    # The weight is not saved in fp8: that would be one more copy of all layers' weights, gathered under FSDP. Neither is
    # what has other scales in the backward pass.
    if fp8.recipe == "rowwise":
        return out, (x_RI, None, None, w_OI)
    # As bits: jax rounds what a remat policy saves to the exponents of an IEEE type, in which 448 is infinite.
    bits = checkpoint_name(jax.lax.bitcast_convert_type(x.values, jnp.uint8), FP8_INPUT)
    return out, (bits, x.scale, w.scale, w_OI)


def _fp8_backward(num_inputs, fp8, residuals, d_out_RO):
    saved_x, x_scale, w_scale, w_OI = residuals
    num_outputs = w_OI.ndim - num_inputs
    rows, w_outputs = tuple(range(d_out_RO.ndim - num_outputs)), tuple(range(num_outputs))
    outputs = tuple(range(len(rows), d_out_RO.ndim))
    by_row = by_output = fp8.quantized(d_out_RO, outputs, fp8.gradient_dtype)
    if fp8.recipe == "tensorwise":
        x, w = Scaled(jax.lax.bitcast_convert_type(saved_x, E4M3), x_scale), to_fp8(w_OI, w_scale)
    else:
        x, w = fp8.quantized(saved_x, rows), fp8.quantized(w_OI, w_outputs)
        by_output = fp8.quantized(d_out_RO, rows, fp8.gradient_dtype)
    d_x_RI = scaled_product(by_row, w, outputs, w_outputs, w_OI.dtype)
    return d_x_RI, scaled_product(by_output, x, rows, rows, w_OI.dtype)


fp8_product.defvjp(_fp8_forward, _fp8_backward)
