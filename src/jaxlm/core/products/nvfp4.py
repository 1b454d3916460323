"""NVFP4: weights in 4-bit floating point, with scales in 8-bit floating point.

Source: NVIDIA 2025, Pretraining Large Language Models with NVFP4 (arXiv:2509.25149), section 2 and appendix B: e2m1 in blocks
of 16, each with an e4m3 scale, and a float32 scale that moves the largest block scale to the largest e4m3 number. Here each
matrix has one of those. The first code of a byte is in its low bits, as in checkpoints of NVIDIA's ModelOpt.
"""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, AxisSpec, NamedArray

from jaxlm.core.products.four_bit import (
    FourBitWeight,
    as_matrices,
    block_maxima,
    blocks_of,
    by_element,
    bytes_of,
    in_shape_of,
    packed,
)
from jaxlm.core.products.fp8 import E4M3, largest_fp8

BLOCK = 16
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
TABLE = np.concatenate([_MAGNITUDES, -_MAGNITUDES])


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
    table: ClassVar[np.ndarray] = TABLE
    first_in_high_bits: ClassVar[bool] = False
    block_size: ClassVar[int] = BLOCK

    @staticmethod
    def of(weight: NamedArray, In: AxisSpec, Out: AxisSpec) -> "NVFP4Weight":
        """Quantizes a weight."""
        exact, num_stacked = as_matrices(weight, In, Out)
        matrix = exact.axes[num_stacked:]
        maxima = block_maxima(exact, num_stacked, BLOCK)
        largest = jnp.max(maxima.array, axis=tuple(range(num_stacked, maxima.array.ndim)))
        scale = NamedArray(largest / (_MAGNITUDES[-1] * largest_fp8(E4M3)), exact.axes[:num_stacked])
        per_matrix = jnp.expand_dims(scale.array, tuple(range(num_stacked, maxima.array.ndim)))
        in_e4m3 = (_over(maxima.array / _MAGNITUDES[-1], per_matrix)).astype(E4M3)
        scales = NamedArray(in_e4m3.astype(jnp.float32) * per_matrix, maxima.axes)
        codes = NamedArray(_e2m1(_over(exact.array, by_element(scales, BLOCK, matrix))), exact.axes)
        bits = NamedArray(jax.lax.bitcast_convert_type(in_e4m3, jnp.uint8), maxima.axes)
        bytes_ = packed(codes, num_stacked, first_in_high_bits=False)
        return NVFP4Weight(codes=bytes_, block_scales=bits, scale=scale, Matrix=matrix)

    def scales(self) -> NamedArray:
        in_e4m3 = jax.lax.bitcast_convert_type(self.block_scales.array, E4M3).astype(jnp.float32)
        trailing = tuple(range(self.scale.array.ndim, in_e4m3.ndim))
        return NamedArray(in_e4m3 * jnp.expand_dims(self.scale.array, trailing), self.block_scales.axes)

    def with_matrix(self, Matrix: tuple[Axis, ...]) -> "NVFP4Weight":
        codes = in_shape_of(self.codes, self.stacked, bytes_of(Matrix))
        block_scales = in_shape_of(self.block_scales, self.stacked, blocks_of(Matrix, BLOCK))
        return NVFP4Weight(codes=codes, block_scales=block_scales, scale=self.scale, Matrix=Matrix)


def _over(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Values divided by scales, and 0 where a scale is 0."""
    return jnp.where(scales > 0, values / jnp.where(scales > 0, scales, 1), 0)


def _e2m1(values: jax.Array) -> jax.Array:
    """uint8, the codes of the closest e2m1 numbers; of two, that with the even code. What is too large becomes 6."""
    bounds = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2
    size = jnp.abs(values)
    codes = sum((size >= bound if code % 2 else size > bound).astype(jnp.uint8) for code, bound in enumerate(bounds))
    return codes | (jnp.signbit(values).astype(jnp.uint8) << 3)
