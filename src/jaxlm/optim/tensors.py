"""Numbers that an optimizer keeps for each tensor.

A tensor is what one layer has of a parameter, and of an expert's parameter what one expert has. Layers are stacked, so an
array contains many tensors, and the numbers have the axes that tell them apart: {layers}, {layers, experts} or none. All
heads of a projection are one tensor.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import EXPERTS, STACKED_LAYERS

_SEPARATE = (*STACKED_LAYERS, EXPERTS)


def per_tensor(parameter: Any, value: float, dtype: jax.typing.DTypeLike) -> Any:
    """One number for each tensor of a parameter. A parameter without named axes is one tensor."""
    axes = _axes(parameter)
    array = jnp.full([axis.size for axis in axes], value, dtype)
    return NamedArray(array, axes) if tree.is_named(parameter) else array


def sums_per_tensor(leaf: Any) -> jax.Array:
    """The sum over each tensor in float32, with the shape of `per_tensor`."""
    within = tuple(n for n, kept in enumerate(_is_separate(leaf)) if not kept)
    return jnp.sum(tree.raw(leaf).astype(jnp.float32), axis=within)


def by_element(numbers: jax.Array, leaf: Any) -> jax.Array:
    """Numbers of tensors in a shape that broadcasts against the array of the parameter."""
    sizes = [size if kept else 1 for size, kept in zip(tree.raw(leaf).shape, _is_separate(leaf), strict=True)]
    assert math.prod(sizes) == numbers.size, f"{numbers.shape} are not the numbers of the tensors of {sizes}"
    return numbers.reshape(sizes)


def with_array(leaf: Any, array: jax.Array) -> Any:
    """The leaf with another array of the same axes."""
    return NamedArray(array, leaf.axes) if tree.is_named(leaf) else array


def with_arrays(old: Any, arrays: Mapping[str, jax.Array]) -> Any:
    """The tree with other arrays of the same axes, by path."""
    return tree.map_leaves(lambda path, leaf: with_array(leaf, arrays[path]), old)


def _axes(leaf: Any) -> tuple[Axis, ...]:
    return tuple(axis for axis in leaf.axes if axis.name in _SEPARATE) if tree.is_named(leaf) else ()


def _is_separate(leaf: Any) -> list[bool]:
    """Whether each axis tells tensors apart."""
    if tree.is_named(leaf):
        return [axis.name in _SEPARATE for axis in leaf.axes]
    return [False] * tree.raw(leaf).ndim
