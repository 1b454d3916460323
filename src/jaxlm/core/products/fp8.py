"""Products in fp8, for layers that quantize their inputs, weights and gradients in training.

Shapes: R rows, I input features, O output features.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxlm.core.devices import cuda_capability
from jaxlm.core.sharding import current_device, current_platform
from jaxlm.core.tracing import CustomVjp, trace_options

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
    """Quantizes a layer's three products (output, gradient of the inputs, gradient of the weight) to fp8.

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
    def scales_rows_alone(self) -> bool:
        """Tells whether the scale of a row of inputs is its own, so that its products do not depend on the other rows."""
        return self.recipe == "rowwise"

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
    """Tells whether layers with an `Fp8` multiply in fp8 in the current trace: in training, for first derivatives."""
    return trace_options().quantized_products and not trace_options().twice_differentiable


def has_fp8_products(device: Any) -> bool:
    """Tells whether a device multiplies matrices in fp8. On others the same numbers are multiplied in a larger dtype."""
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
