"""The matrix product of linear layers, adapters, experts and the head, in whatever form the weight is stored.

A product is computed in the dtype of its weight, so `core/precision.py` selects a product's dtype by casting the weight.
A weight in another form than a floating-point array is a `StoredWeight`, which brings its own product. A layer with an
`Fp8` multiplies in fp8 in training, although its weight is stored as always.
"""

import functools
from typing import Any

from jaxlm.core.imports import haliax as hax

import jax
import jax.numpy as jnp
from haliax import Axis, AxisSelection, NamedArray
from jax.sharding import PartitionSpec

from jaxlm.core.products.fp8 import Fp8, fp8_product, multiplies_in_fp8
from jaxlm.core.products.stored_weights import StoredArray, StoredWeight, Weight
from jaxlm.core.tracing import CustomVjp


def operand(x, weight):
    """x in the dtype of its product with a weight: that of the weight, or of x if the weight is in another form."""
    return x if isinstance(weight, StoredWeight | StoredArray) else x.astype(weight.dtype)


def dot(x: NamedArray, weight: Weight, axis: AxisSelection, fp8: Fp8 | None = None) -> NamedArray:
    """The product of x and a weight over `axis`, in the dtype of `operand`. Args: fp8: how it is quantized in training."""
    if isinstance(weight, StoredWeight):
        return _stored_product(x, weight, axis if isinstance(axis, str | Axis) else tuple(axis), x.axes, x.dtype)
    x = operand(x, weight)
    if fp8 is None or not multiplies_in_fp8():
        return hax.dot(x, weight, axis=axis)
    summed = (axis,) if isinstance(axis, str | Axis) else tuple(axis)
    inputs = tuple(axis if isinstance(axis, str) else axis.name for axis in summed)
    rows, outputs = (tuple(a for a in array.axes if a.name not in inputs) for array in (x, weight))
    x_RI, w_OI = (array.rearrange((*axes, *inputs)).array for array, axes in ((x, rows), (weight, outputs)))
    return NamedArray(fp8_product(x_RI, w_OI, len(inputs), fp8), (*rows, *outputs))


@functools.partial(CustomVjp, nondiff_argnums=(2, 3, 4))
def _stored_product(x: NamedArray, weight: StoredWeight, axis: AxisSelection, axes: Any, dtype: Any) -> NamedArray:
    """The product with a stored weight. The backward pass saves the stored form, and makes its floats again.

    Otherwise the loop over layers would save the floats of all of them, whatever a remat policy says.

    Args:
        axes, dtype: of x.
    """
    return weight.dot(x, axis)


def _stored_forward(x, weight, axis, axes, dtype):
    return weight.dot(x, axis), weight


def _stored_backward(axis, axes, dtype, weight, d_out):
    # Without a loop, XLA would merge this with the forward pass, and keep the floats in between.
    weight, d_out = jax.lax.optimization_barrier((weight, d_out))
    x = NamedArray(jax.ShapeDtypeStruct([axis.size for axis in axes], dtype), axes)  # pyright: ignore[reportArgumentType]
    (d_x,) = jax.linear_transpose(lambda x: weight.dot(x, axis), x)(d_out)
    return d_x, None


_stored_product.defvjp(_stored_forward, _stored_backward)


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
    return weight.specs(spec) if isinstance(weight, StoredArray) else spec
