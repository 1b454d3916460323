"""Weights in another form than a floating-point array. Each brings its own product."""

import abc
import math
from collections.abc import Collection
from typing import Any, ClassVar

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSelection, AxisSpec, NamedArray
from jax.sharding import PartitionSpec

from jaxlm.core import tree
from jaxlm.core.axes import axes_of

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

    @abc.abstractmethod
    def specs(self, spec: PartitionSpec) -> Any:
        """The partition specs of its arrays, given that of the weight.

        Raises:
            ConfigError: they cannot be cut that way.
        """


def spec_of(array: jax.Array, spec: PartitionSpec) -> PartitionSpec:
    """The partition spec of an array of a weight, some of whose axes may have size 1. Args: spec: of the weight."""
    return PartitionSpec(*(None if size == 1 else entry for size, entry in zip(array.shape, spec, strict=True)))


class StoredWeight(tree.Packed):
    """A weight that is not an array of the run's dtypes. Precision casts leave it unchanged, and it cannot be trained."""

    @property
    @abc.abstractmethod
    def form(self) -> str:
        """The name of the form in which it is stored, a single word."""

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

    def check_cut(self, axes: Collection[str]) -> None:
        """Raises `ConfigError` if kernels cannot get parts of it along these axes (`StoredArray.specs`)."""

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

    def num_parameters(self) -> int:
        return self.size


Weight = NamedArray | StoredWeight


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
    form: ClassVar[str] = "int8"

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

    def specs(self, spec: PartitionSpec) -> Any:
        return jax.tree.map(lambda array: spec_of(array, spec), self)

    def einsum(self, subscripts: str, x: jax.Array, dtype) -> jax.Array:
        labels, out_labels = subscripts.partition(",")[2].split("->")
        sizes = dict(zip(labels, self.scale.shape, strict=True))
        scale = self.scale.reshape([sizes.get(label, 1) for label in out_labels])
        out = jnp.einsum(subscripts, x, self.values.astype(x.dtype), preferred_element_type=jnp.float32)
        return (out * scale).astype(x.dtype if dtype is None else dtype)


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
