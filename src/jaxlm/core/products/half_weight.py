"""Frozen weights in bfloat16 or float16, whatever the dtypes of the run."""

from typing import Any

from jaxlm.core.imports import haliax as hax

import jax
import jax.numpy as jnp
from haliax import Axis, AxisSelection, AxisSpec, NamedArray
from jax.sharding import PartitionSpec

from jaxlm.core.products.stored_weights import StoredArray, StoredWeight, spec_of


class HalfWeight(StoredWeight):
    """A weight in 16 bits. Products are computed in the dtype of their inputs. Attributes: values: bfloat16 or float16."""

    values: NamedArray

    @property
    def form(self) -> str:
        return self.values.dtype.name

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.values.axes

    def dot(self, x: NamedArray, axis: AxisSelection) -> NamedArray:
        return hax.dot(x, self.values.astype(x.dtype), axis=axis)

    def floats(self, dtype) -> NamedArray:
        return self.values.astype(dtype)

    def arranged(self, order: tuple[str, ...]) -> "HalfArray":
        return HalfArray(self.values.rearrange(order).array)

    def flatten_axes(self, old: AxisSpec, new: str) -> "HalfWeight":
        return HalfWeight(self.values.flatten_axes(old, new))

    def unflatten_axis(self, old: str, new: AxisSpec) -> "HalfWeight":
        return HalfWeight(self.values.unflatten_axis(old, new))


class HalfArray(StoredArray):
    """A `HalfWeight` without axis names. Attributes: values: bfloat16 or float16."""

    values: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def floats(self, dtype) -> jax.Array:
        return self.values.astype(dtype)

    def specs(self, spec: PartitionSpec) -> Any:
        return jax.tree.map(lambda array: spec_of(array, spec), self)

    def einsum(self, subscripts: str, x: jax.Array, dtype) -> jax.Array:
        return jnp.einsum(subscripts, x, self.values.astype(x.dtype), preferred_element_type=dtype)
