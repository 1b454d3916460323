"""Stores weights in four bits (NF4, NVFP4 and MXFP4): codes in blocks of consecutive elements, each block with a scale.

Blocks follow the flattened order of (outputs, inputs), which is how PyTorch stores the weight of a linear layer. So codes
and scales can be those of other programs, number by number.

NF4 is 4-bit NormalFloat, with scales that are quantized too. Where the papers leave it open, as bitsandbytes has it: blocks
of 64 and of 256, scales minus their mean, the first code in the high bits.

NVFP4 is 4-bit floating point, with scales in 8-bit floating point: e2m1 in blocks of 16, each with an e4m3 scale, and a
float32 scale that moves the largest block scale to the largest e4m3 number. Here each matrix has one of those. The first
code of a byte is in its low bits, as in checkpoints of NVIDIA's ModelOpt.

MXFP4 is e2m1 in blocks of 32, each with a power of two (e8m0). A weight that was in MXFP4 keeps its values: the power of two
here is that of the block's largest number, so no number needs more digits than before.

Source: NF4: Dettmers et al. 2023, QLoRA: Efficient Finetuning of Quantized LLMs (arXiv:2305.14314), section 3 and appendix
E; the 8-bit codes of its scales: Dettmers 2015, 8-Bit Approximations for Parallelism in Deep Learning (arXiv:1511.04561),
section 3. NVFP4: NVIDIA 2025, Pretraining Large Language Models with NVFP4 (arXiv:2509.25149), section 2 and appendix B.
MXFP4: OCP Microscaling Formats (MX) Specification v1.0, sections 5.2 to 5.4 and 6.3.
"""

import abc
import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, AxisSelection, AxisSpec, NamedArray
from jax.sharding import PartitionSpec

from jaxlm.core import tree
from jaxlm.core.axes import BLOCKS, PACKED, SCALE_BLOCKS, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.dynamic_map import dynamic_map
from jaxlm.core.products.fp8 import E4M3, largest_fp8
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
        "surgery quantize: kind: nf4, nvfp4 or mxfp4 given for experts whose features are sharded (mlp in"
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


NF4_BLOCK = 64
_SCALE_BLOCK = 256
_SMALLEST = float(np.finfo(np.float32).tiny)  # a block of zeros is divided by it
# Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero (appendix E).
NF4_TABLE = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)


class Scales(eqx.Module):
    """The scales of a weight's blocks."""

    @abc.abstractmethod
    def floats(self) -> NamedArray:
        """float32 {layers, *blocks}."""

    @abc.abstractmethod
    def with_blocks(self, num_stacked: int, blocks: tuple[Axis, ...]) -> "Scales":
        """The same scales with other axes of the blocks. Args: num_stacked: number of axes before those of the blocks."""


class FloatScales(Scales):
    """Scales as they are. Attributes: values: float32 {layers, *blocks}."""

    values: NamedArray

    def floats(self) -> NamedArray:
        return self.values

    def with_blocks(self, num_stacked: int, blocks: tuple[Axis, ...]) -> "FloatScales":
        return FloatScales(in_shape_of(self.values, self.values.axes[:num_stacked], blocks))


class QuantizedScales(Scales):
    """Scales in 8-bit codes, with a scale of their own for 256 of them: `dynamic_map(True)[codes] * maxima + mean`.

    Attributes:
        codes: uint8 {layers, *blocks}.
        maxima: float32 {layers, scale_blocks}.
        mean: float32 {layers}, of the scales of each matrix.
    """

    codes: NamedArray
    maxima: NamedArray
    mean: NamedArray

    @staticmethod
    def of(scales: NamedArray, num_stacked: int) -> "QuantizedScales":
        """Quantizes float32 {layers, *blocks}."""
        stacked, blocks = scales.axes[:num_stacked], scales.axes[num_stacked:]
        mean = hax.mean(scales, axis=blocks)
        centered = in_shape_of(scales - mean, stacked, (_flat(blocks),))
        maxima = block_maxima(centered, num_stacked, _SCALE_BLOCK)
        normal = _normalized(centered, maxima, num_stacked, _SCALE_BLOCK)
        codes = NamedArray(nearest(normal, dynamic_map(True)), centered.axes)
        maxima = in_shape_of(maxima, stacked, (maxima.axes[-1].alias(SCALE_BLOCKS),))
        return QuantizedScales(in_shape_of(codes, stacked, blocks), maxima, mean)

    def floats(self) -> NamedArray:
        stacked = self.mean.axes
        blocks = self.codes.axes[len(stacked) :]
        (Flat,) = blocks_of((_flat(blocks),), 1)
        groups = (*stacked, *blocks_of((Flat,), _SCALE_BLOCK))
        maxima = by_element(NamedArray(self.maxima.array, groups), _SCALE_BLOCK, (Flat,)).reshape(
            self.codes.array.shape
        )
        centered = jnp.asarray(dynamic_map(True))[self.codes.array] * maxima
        mean = jnp.expand_dims(self.mean.array, tuple(range(len(stacked), centered.ndim)))
        return NamedArray(centered + mean, self.codes.axes)

    def with_blocks(self, num_stacked: int, blocks: tuple[Axis, ...]) -> "QuantizedScales":
        codes = in_shape_of(self.codes, self.codes.axes[:num_stacked], blocks)
        return QuantizedScales(codes, self.maxima, self.mean)


class NF4Weight(FourBitWeight):
    """A weight in NF4: 4.127 bits per parameter, or 4.5 with scales in float32.

    Attributes:
        codes, Matrix: as in `FourBitWeight`.
        absmax: the largest absolute value of each block of 64.
    """

    codes: NamedArray
    absmax: Scales
    Matrix: tuple[Axis, ...] = eqx.field(static=True)
    form: ClassVar[str] = "nf4"
    table: ClassVar[np.ndarray] = NF4_TABLE
    first_in_high_bits: ClassVar[bool] = True
    block_size: ClassVar[int] = NF4_BLOCK

    @staticmethod
    def of(weight: NamedArray, In: AxisSpec, Out: AxisSpec, *, double_quant: bool = True) -> "NF4Weight":
        """Quantizes a weight. Args: double_quant: quantize the scales too."""
        exact, num_stacked = as_matrices(weight, In, Out)
        absmax = block_maxima(exact, num_stacked, NF4_BLOCK)
        codes = NamedArray(nearest(_normalized(exact, absmax, num_stacked, NF4_BLOCK), NF4_TABLE), exact.axes)
        scales = QuantizedScales.of(absmax, num_stacked) if double_quant else FloatScales(absmax)
        bytes_ = packed(codes, num_stacked, first_in_high_bits=True)
        return NF4Weight(codes=bytes_, absmax=scales, Matrix=exact.axes[num_stacked:])

    def scales(self) -> NamedArray:
        return self.absmax.floats()

    def with_matrix(self, Matrix: tuple[Axis, ...]) -> "NF4Weight":
        absmax = self.absmax.with_blocks(len(self.stacked), blocks_of(Matrix, NF4_BLOCK))
        codes = in_shape_of(self.codes, self.stacked, bytes_of(Matrix))
        return NF4Weight(codes=codes, absmax=absmax, Matrix=Matrix)


def _flat(blocks: tuple[Axis, ...]) -> Axis:
    return Axis(SCALE_BLOCKS, hax.axis_size(blocks))


def _normalized(exact: NamedArray, maxima: NamedArray, num_stacked: int, size: int) -> jax.Array:
    """Each element divided by the maximum of its block, as bitsandbytes does it: times the inverse."""
    # XLA would divide by the maximum instead, which rounds differently.
    inverse = NamedArray(jax.lax.optimization_barrier(1 / jnp.maximum(maxima.array, _SMALLEST)), maxima.axes)
    return jnp.clip(exact.array * by_element(inverse, size, exact.axes[num_stacked:]), -1, 1)


NVFP4_BLOCK = 16
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
NVFP4_TABLE = np.concatenate([_MAGNITUDES, -_MAGNITUDES])


class NVFP4Weight(FourBitWeight):
    """A weight in NVFP4: 4.5 bits per parameter.

    Attributes:
        codes, Matrix: as in `FourBitWeight`.
        block_scales: uint8 {layers, *blocks}, the bits of e4m3 numbers.
        scale: float32 {layers}, of each matrix.
    """

    codes: NamedArray
    block_scales: NamedArray
    scale: NamedArray
    Matrix: tuple[Axis, ...] = eqx.field(static=True)
    form: ClassVar[str] = "nvfp4"
    table: ClassVar[np.ndarray] = NVFP4_TABLE
    first_in_high_bits: ClassVar[bool] = False
    block_size: ClassVar[int] = NVFP4_BLOCK

    @staticmethod
    def of(weight: NamedArray, In: AxisSpec, Out: AxisSpec) -> "NVFP4Weight":
        """Quantizes a weight."""
        exact, num_stacked = as_matrices(weight, In, Out)
        matrix = exact.axes[num_stacked:]
        maxima = block_maxima(exact, num_stacked, NVFP4_BLOCK)
        largest = jnp.max(maxima.array, axis=tuple(range(num_stacked, maxima.array.ndim)))
        scale = NamedArray(largest / (_MAGNITUDES[-1] * largest_fp8(E4M3)), exact.axes[:num_stacked])
        per_matrix = jnp.expand_dims(scale.array, tuple(range(num_stacked, maxima.array.ndim)))
        in_e4m3 = (_over(maxima.array / _MAGNITUDES[-1], per_matrix)).astype(E4M3)
        scales = NamedArray(in_e4m3.astype(jnp.float32) * per_matrix, maxima.axes)
        codes = NamedArray(_e2m1(_over(exact.array, by_element(scales, NVFP4_BLOCK, matrix))), exact.axes)
        bits = NamedArray(jax.lax.bitcast_convert_type(in_e4m3, jnp.uint8), maxima.axes)
        bytes_ = packed(codes, num_stacked, first_in_high_bits=False)
        return NVFP4Weight(codes=bytes_, block_scales=bits, scale=scale, Matrix=matrix)

    def scales(self) -> NamedArray:
        in_e4m3 = jax.lax.bitcast_convert_type(self.block_scales.array, E4M3).astype(jnp.float32)
        trailing = tuple(range(self.scale.array.ndim, in_e4m3.ndim))
        return NamedArray(in_e4m3 * jnp.expand_dims(self.scale.array, trailing), self.block_scales.axes)

    def with_matrix(self, Matrix: tuple[Axis, ...]) -> "NVFP4Weight":
        codes = in_shape_of(self.codes, self.stacked, bytes_of(Matrix))
        block_scales = in_shape_of(self.block_scales, self.stacked, blocks_of(Matrix, NVFP4_BLOCK))
        return NVFP4Weight(codes=codes, block_scales=block_scales, scale=self.scale, Matrix=Matrix)


MXFP4_BLOCK = 32
_BIAS = 127  # of e8m0 numbers
_DIGITS = 23  # of float32


class MXFP4Weight(FourBitWeight):
    """A weight in MXFP4: 4.25 bits per parameter.

    Attributes:
        codes, Matrix: as in `FourBitWeight`.
        exponents: uint8 {layers, *blocks}, the bits of e8m0 numbers.
    """

    codes: NamedArray
    exponents: NamedArray
    Matrix: tuple[Axis, ...] = eqx.field(static=True)
    form: ClassVar[str] = "mxfp4"
    table: ClassVar[np.ndarray] = NVFP4_TABLE
    first_in_high_bits: ClassVar[bool] = False
    block_size: ClassVar[int] = MXFP4_BLOCK

    @staticmethod
    def of(weight: NamedArray, In: AxisSpec, Out: AxisSpec) -> "MXFP4Weight":
        """Quantizes a weight."""
        exact, num_stacked = as_matrices(weight, In, Out)
        matrix = exact.axes[num_stacked:]
        maxima = block_maxima(exact, num_stacked, MXFP4_BLOCK)
        _, exponents = jnp.frexp(maxima.array)  # the largest number becomes one from 4 up to 8, of which 6 is written
        bits = NamedArray(jnp.clip(exponents - 3 + _BIAS, 1, 2 * _BIAS).astype(jnp.uint8), maxima.axes)
        codes = NamedArray(_e2m1(_over(exact.array, by_element(_powers(bits), MXFP4_BLOCK, matrix))), exact.axes)
        bytes_ = packed(codes, num_stacked, first_in_high_bits=False)
        return MXFP4Weight(codes=bytes_, exponents=bits, Matrix=matrix)

    def scales(self) -> NamedArray:
        return _powers(self.exponents)

    def with_matrix(self, Matrix: tuple[Axis, ...]) -> "MXFP4Weight":
        codes = in_shape_of(self.codes, self.stacked, bytes_of(Matrix))
        exponents = in_shape_of(self.exponents, self.stacked, blocks_of(Matrix, MXFP4_BLOCK))
        return MXFP4Weight(codes=codes, exponents=exponents, Matrix=Matrix)


def _powers(bits: NamedArray) -> NamedArray:
    """float32, the powers of two with these bits as e8m0 numbers, from 1 on: 0 is not normal in float32."""
    return NamedArray(jax.lax.bitcast_convert_type(bits.array.astype(jnp.uint32) << _DIGITS, jnp.float32), bits.axes)


def _over(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Values divided by scales, and 0 where a scale is 0."""
    return jnp.where(scales > 0, values / jnp.where(scales > 0, scales, 1), 0)


def _e2m1(values: jax.Array) -> jax.Array:
    """uint8, the codes of the closest e2m1 numbers; of two, that with the even code. What is too large becomes 6."""
    bounds = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2
    size = jnp.abs(values)
    codes = sum((size >= bound if code % 2 else size > bound).astype(jnp.uint8) for code, bound in enumerate(bounds))
    return codes | (jnp.signbit(values).astype(jnp.uint8) << 3)
