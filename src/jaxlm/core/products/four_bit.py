"""Weights in four bits: codes in blocks of consecutive elements, each block with a scale.

Blocks follow the flattened order of (outputs, inputs), which is how PyTorch stores the weight of a linear layer. So codes and
scales can be those of other programs, number by number.
"""

import abc
import math
from collections.abc import Collection, Sequence
from typing import Any

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, AxisSelection, AxisSpec, NamedArray
from jax.sharding import PartitionSpec

from jaxlm.core import tree
from jaxlm.core.axes import BLOCKS, PACKED, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.stored_weights import StoredArray, StoredWeight


class FourBitWeight(StoredWeight):
    """A weight of codes from 0 to 15, two in a byte. A code stands for an entry of `table` times the scale of its block.

    Where the last axis has a whole number of bytes or blocks, codes and scales keep the axes of the weight, of which the
    last one is shorter. So they are sharded as the weight is. Otherwise they are flat, and every device has all of them.

    Attributes:
        codes: uint8 {layers, *Out, *In}, the last axis half as long; or {layers, packed}. `layers` stands for the axes that
            stack matrices, if there are any.
        Matrix: the axes of one matrix, (*Out, *In).
        table: float32 [16], what the codes stand for.
        first_in_high_bits: whether the first code of a byte is in its high bits.
        block_size: number of consecutive elements that share a scale.
    """

    codes: eqx.AbstractVar[NamedArray]
    Matrix: eqx.AbstractVar[tuple[Axis, ...]]
    table: eqx.AbstractClassVar[np.ndarray]
    first_in_high_bits: eqx.AbstractClassVar[bool]
    block_size: eqx.AbstractClassVar[int]

    @abc.abstractmethod
    def scales(self) -> NamedArray:
        """float32 {layers, *blocks}, the scale of each block (`blocks_of`)."""

    @abc.abstractmethod
    def with_matrix(self, Matrix: tuple[Axis, ...]) -> "FourBitWeight":
        """The same weight with other axes, whose flattened order is the same."""

    @property
    def stacked(self) -> tuple[Axis, ...]:
        """The axes that stack matrices."""
        return self.codes.axes[: len(self.codes.axes) - len(bytes_of(self.Matrix))]

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (*self.stacked, *self.Matrix)

    def dot(self, x: NamedArray, axis: AxisSelection) -> NamedArray:
        return hax.dot(x, self.floats(x.dtype), axis=axis)

    def floats(self, dtype) -> NamedArray:
        high, low = self.codes.array >> 4, self.codes.array & 0xF
        pair = (high, low) if self.first_in_high_bits else (low, high)
        codes = _of_groups(jnp.stack(pair, axis=-1), self.stacked, self.Matrix)
        scales = by_element(self.scales(), self.block_size, self.Matrix)
        # Not a tree of selections: XLA for CPUs would make arrays of its constants, which live as long as the loop.
        values = jnp.asarray(self.table).at[codes].get(mode="promise_in_bounds")
        return NamedArray((values * scales).astype(dtype), self.axes)

    def arranged(self, order: tuple[str, ...]) -> "FourBitArray":
        num_stacked = len(self.stacked)
        assert order[:num_stacked] == tuple(axis.name for axis in self.stacked), "matrices are not cut"

        def first(leaf: NamedArray) -> NamedArray:
            return NamedArray(leaf.array[(0,) * num_stacked], leaf.axes[num_stacked:])

        one = jax.tree.structure(jax.eval_shape(lambda: jax.tree.map(first, self, is_leaf=tree.is_named)))
        sizes = tuple(self.resolve_axis(name).size for name in order[num_stacked:])
        return FourBitArray(
            tuple(jax.tree.leaves(self)), one, order[num_stacked:], sizes, self.codes.array.ndim - num_stacked
        )

    def check_cut(self, axes: Collection[str]) -> None:
        if any(axis.name in axes for axis in self.Matrix):
            raise _cut_blocks()

    def flatten_axes(self, old: AxisSpec, new: str) -> "FourBitWeight":
        axes = axes_of(old)
        at, size = self.Matrix.index(axes[0]), hax.axis_size(axes)
        assert self.Matrix[at : at + len(axes)] == axes, "only neighboring axes of a matrix are flattened"
        return self.with_matrix((*self.Matrix[:at], Axis(new, size), *self.Matrix[at + len(axes) :]))

    def unflatten_axis(self, old: str, new: AxisSpec) -> "FourBitWeight":
        at = self.Matrix.index(self.resolve_axis(old))
        return self.with_matrix((*self.Matrix[:at], *axes_of(new), *self.Matrix[at + 1 :]))


class FourBitArray(StoredArray):
    """A `FourBitWeight` without axis names. Its arrays can be sliced along the axes that stack matrices.

    Attributes:
        parts: the arrays of the weight. Those axes are the first of each.
        one: the structure of a weight of a single matrix.
        order: the axes of a matrix.
        sizes: likewise.
        rank: the number of axes of the codes of a single matrix.
    """

    parts: tuple[jax.Array, ...]
    one: Any = eqx.field(static=True)
    order: tuple[str, ...] = eqx.field(static=True)
    sizes: tuple[int, ...] = eqx.field(static=True)
    rank: int = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._stacked, *self.sizes)

    def floats(self, dtype) -> jax.Array:
        def matrix(*parts: jax.Array) -> jax.Array:
            return jax.tree.unflatten(self.one, parts).floats(dtype).rearrange(self.order).array

        make = matrix
        for _ in self._stacked:
            make = jax.vmap(make)
        return make(*self.parts)

    def einsum(self, subscripts: str, x: jax.Array, dtype) -> jax.Array:
        return jnp.einsum(subscripts, x, self.floats(x.dtype), preferred_element_type=dtype)

    def specs(self, spec: PartitionSpec) -> Any:
        num_stacked = len(self._stacked)
        if any(spec[num_stacked:]):
            raise _cut_blocks()
        return jax.tree.map(lambda part: PartitionSpec(*spec[:num_stacked], *[None] * (part.ndim - num_stacked)), self)

    @property
    def _stacked(self) -> tuple[int, ...]:
        return self.parts[0].shape[: self.parts[0].ndim - self.rank]


def _cut_blocks() -> ConfigError:
    return ConfigError(
        "surgery quantize: kind: nf4 or nvfp4 given for experts whose features are sharded (mlp in"
        " trainer.tensor_parallel_axes), but blocks of scales cannot be cut. Shard experts instead of mlp, or store them with"
        " kind: int8, bfloat16 or float16"
    )


def bytes_of(matrix: Sequence[Axis]) -> tuple[Axis, ...]:
    """The axes of the bytes of a matrix."""
    return _groups(matrix, 2, PACKED)


def blocks_of(matrix: Sequence[Axis], size: int) -> tuple[Axis, ...]:
    """The axes of the blocks of a matrix. Args: size: number of elements of a block."""
    return _groups(matrix, size, BLOCKS)


def _groups(matrix: Sequence[Axis], size: int, flat: str) -> tuple[Axis, ...]:
    *outer, last = matrix
    if last.size % size == 0:
        return (*outer, last.resize(last.size // size))
    return (Axis(flat, -(-hax.axis_size(matrix) // size)),)


def in_shape_of(array: NamedArray, stacked: Sequence[Axis], axes: Sequence[Axis]) -> NamedArray:
    """The numbers of a stack of arrays in the same order, with other axes."""
    axes = (*stacked, *axes)
    return NamedArray(array.array.reshape([axis.size for axis in axes]), axes)


def as_matrices(weight: NamedArray, In: AxisSpec, Out: AxisSpec) -> tuple[NamedArray, int]:
    """A weight in float32 {layers, *Out, *In}, and the number of axes that stack its matrices."""
    matrix = (*axes_of(Out), *axes_of(In))
    stacked = tuple(axis for axis in weight.axes if axis not in matrix)
    return weight.rearrange((*stacked, *matrix)).astype(jnp.float32), len(stacked)


def block_maxima(weight: NamedArray, num_stacked: int, size: int) -> NamedArray:
    """The largest absolute value of each block, {layers, *blocks}. Args: weight: {layers, *Out, *In}."""
    stacked, matrix = weight.axes[:num_stacked], weight.axes[num_stacked:]
    axes = (*stacked, *blocks_of(matrix, size))
    return NamedArray(jnp.max(jnp.abs(_in_groups(weight, axes, size)), axis=-1), axes)


def by_element(scales: NamedArray, size: int, matrix: Sequence[Axis]) -> jax.Array:
    """The scale of each element, [*layers, *matrix]. Args: scales: {layers, *blocks}. size: number of elements of a block."""
    stacked = scales.axes[: len(scales.axes) - len(blocks_of(matrix, size))]
    return _of_groups(jnp.broadcast_to(scales.array[..., None], (*scales.array.shape, size)), stacked, matrix)


def packed(codes: NamedArray, num_stacked: int, *, first_in_high_bits: bool) -> NamedArray:
    """Codes from 0 to 15 {layers, *Out, *In} as `FourBitWeight.codes`."""
    axes = (*codes.axes[:num_stacked], *bytes_of(codes.axes[num_stacked:]))
    pairs = _in_groups(codes, axes, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    high, low = (first, second) if first_in_high_bits else (second, first)
    return NamedArray((high << 4) | low, axes)


def _in_groups(array: NamedArray, axes: Sequence[Axis], size: int) -> jax.Array:
    """Elements {layers, *matrix} in groups [*axes, size], the last one filled up with zeros."""
    shape, values = [*(axis.size for axis in axes), size], array.array
    if values.size != math.prod(shape):
        flat = values.reshape(*shape[:-2], -1)
        values = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % size)])
    return values.reshape(shape)


def _of_groups(groups: jax.Array, stacked: Sequence[Axis], matrix: Sequence[Axis]) -> jax.Array:
    """The inverse of `_in_groups`."""
    shape, num = [axis.size for axis in (*stacked, *matrix)], hax.axis_size(matrix)
    if groups.size != math.prod(shape):
        groups = groups.reshape(*shape[: len(stacked)], -1)[..., :num]
    return groups.reshape(shape)


def nearest(values: jax.Array, table: np.ndarray) -> jax.Array:
    """uint8, the index of the entry of an ascending table that is closest to each value; of two, the first one."""
    bounds = (table[:-1] + table[1:]) / np.float32(2)
    if len(bounds) < 16:
        return sum((values > bound).astype(jnp.uint8) for bound in bounds)  # pyright: ignore[reportReturnType]
    return jnp.searchsorted(jnp.asarray(bounds), values, side="left").astype(jnp.uint8)
