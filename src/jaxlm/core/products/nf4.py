"""NF4: weights in 4-bit NormalFloat, with scales that are quantized too.

Source: Dettmers et al. 2023, QLoRA: Efficient Finetuning of Quantized LLMs (arXiv:2305.14314), section 3 and appendix E. The
8-bit codes of scales: Dettmers 2015, 8-Bit Approximations for Parallelism in Deep Learning (arXiv:1511.04561), section 3.
Where the papers leave it open, as bitsandbytes has it: blocks of 64 and of 256, scales minus their mean, the first code in
the high bits.
"""

import abc
from typing import ClassVar

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, AxisSpec, NamedArray

from jaxlm.core.axes import SCALE_BLOCKS
from jaxlm.core.products.dynamic_map import dynamic_map
from jaxlm.core.products.four_bit import (
    FourBitWeight,
    as_matrices,
    block_maxima,
    blocks_of,
    by_element,
    bytes_of,
    in_shape_of,
    nearest,
    packed,
)

BLOCK = 64
_SCALE_BLOCK = 256
_SMALLEST = float(np.finfo(np.float32).tiny)  # a block of zeros is divided by it
# Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero (appendix E).
TABLE = np.array(
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
    table: ClassVar[np.ndarray] = TABLE
    first_in_high_bits: ClassVar[bool] = True
    block_size: ClassVar[int] = BLOCK

    @staticmethod
    def of(weight: NamedArray, In: AxisSpec, Out: AxisSpec, *, double_quant: bool = True) -> "NF4Weight":
        """Quantizes a weight. Args: double_quant: quantize the scales too."""
        exact, num_stacked = as_matrices(weight, In, Out)
        absmax = block_maxima(exact, num_stacked, BLOCK)
        codes = NamedArray(nearest(_normalized(exact, absmax, num_stacked, BLOCK), TABLE), exact.axes)
        scales = QuantizedScales.of(absmax, num_stacked) if double_quant else FloatScales(absmax)
        bytes_ = packed(codes, num_stacked, first_in_high_bits=True)
        return NF4Weight(codes=bytes_, absmax=scales, Matrix=exact.axes[num_stacked:])

    def scales(self) -> NamedArray:
        return self.absmax.floats()

    def with_matrix(self, Matrix: tuple[Axis, ...]) -> "NF4Weight":
        absmax = self.absmax.with_blocks(len(self.stacked), blocks_of(Matrix, BLOCK))
        codes = in_shape_of(self.codes, self.stacked, bytes_of(Matrix))
        return NF4Weight(codes=codes, absmax=absmax, Matrix=Matrix)


def _flat(blocks: tuple[Axis, ...]) -> Axis:
    return Axis(SCALE_BLOCKS, hax.axis_size(blocks))


def _normalized(exact: NamedArray, maxima: NamedArray, num_stacked: int, size: int) -> jax.Array:
    """Each element divided by the maximum of its block, as bitsandbytes does it: times the inverse."""
    # XLA would divide by the maximum instead, which rounds differently.
    inverse = NamedArray(jax.lax.optimization_barrier(1 / jnp.maximum(maxima.array, _SMALLEST)), maxima.axes)
    return jnp.clip(exact.array * by_element(inverse, size, exact.axes[num_stacked:]), -1, 1)
