"""A moment in 8 bits: a code for each element, and the largest absolute value of each block of 256 elements.

Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861), section 2.1; bitsandbytes
0.50.2 for the block size (2048 in the paper) and for multiplying by the reciprocal of the largest value.
"""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.core import tree
from jaxlm.core.axes import STACKED_LAYERS, axis_names
from jaxlm.core.products.dynamic_map import nearest_codes, numbers_of
from jaxlm.core.sharding import current_layout

BLOCK_SIZE = 256
_SMALLEST = float(np.finfo(np.float32).tiny)  # the reciprocals of smaller numbers are infinite
_UNNAMED = "dim"  # with its number, the name of an axis of an array without names


class QuantizedMoment(eqx.Module):
    """A moment in 8 bits.

    A block has 256 consecutive elements in row-major order. It is within the last axes that together have a multiple of 256
    elements; if there are none, within a layer, whose last block may be shorter. The codes of a block of zeros are those of
    0, so that new codes are zeros with any `absmax`.

    Attributes:
        codes: uint8, with the axes of the moment.
        absmax: float32, with the axes that blocks do not extend along, and the blocks, which have the name of the first of
            the others. So it is sharded, and cut into layers, like the moment.
        is_signed: whether the moment can be negative.
        dtype: of the moment.
    """

    codes: NamedArray | jax.Array
    absmax: NamedArray | jax.Array
    is_signed: bool = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    @staticmethod
    def of(moment: NamedArray | jax.Array, is_signed: bool) -> "QuantizedMoment":
        """Quantizes a moment. Traceable."""
        blocks = _Blocks.of(moment)
        exact = tree.raw(moment).astype(jnp.float32)
        absmax = blocks.largest(jnp.abs(exact))
        scale = jnp.where(absmax < _SMALLEST, 0.0, 1 / absmax)
        codes = nearest_codes(exact * blocks.by_element(scale), is_signed)
        return QuantizedMoment._made(moment, codes, absmax, is_signed)

    @staticmethod
    def constant(moment: NamedArray | jax.Array, value: float, is_signed: bool) -> "QuantizedMoment":
        """As `of`, for a moment with this value everywhere. XLA would take minutes to fold the quantization of a constant."""
        blocks = _Blocks.of(moment)
        size = np.float32(abs(value)) if abs(value) >= _SMALLEST else np.float32(0)
        code = nearest_codes(jnp.float32(np.sign(value) if size else 0), is_signed)
        codes = jnp.full(_shape(blocks.axes), code, jnp.uint8)
        return QuantizedMoment._made(moment, codes, jnp.full(_shape(blocks.absmax_axes), size), is_signed)

    @staticmethod
    def _made(like: NamedArray | jax.Array, codes: jax.Array, absmax: jax.Array, is_signed: bool) -> "QuantizedMoment":
        if isinstance(like, NamedArray):
            absmax_axes = _Blocks.of(like).absmax_axes
            return QuantizedMoment(NamedArray(codes, like.axes), NamedArray(absmax, absmax_axes), is_signed, like.dtype)
        return QuantizedMoment(codes, absmax, is_signed, like.dtype)

    def floats(self) -> NamedArray | jax.Array:
        """The moment in its dtype. Traceable."""
        blocks = _Blocks.of(self.codes)
        numbers = numbers_of(tree.raw(self.codes), self.is_signed)
        array = (numbers * blocks.by_element(tree.raw(self.absmax))).astype(self.dtype)
        return NamedArray(array, blocks.axes) if tree.is_named(self.codes) else array


def layer_size(leaf: Any) -> int:
    """The number of elements of an array in each layer."""
    if not tree.is_named(leaf):
        return leaf.size
    return math.prod(axis.size for axis in leaf.axes if axis.name not in STACKED_LAYERS)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Where the blocks of an array are.

    With FSDP, a block may be on several devices. Then its largest value is found in two steps, first of each chunk that one
    device has, so that only one number of each chunk moves between devices. The largest of numbers does not depend on the
    order, so the result is the same bit for bit.

    Attributes:
        axes: of the array.
        first: number of axes that blocks do not extend along.
        split: number of axes that chunks do not extend along.
        chunk: number of consecutive elements that are on one device and in one block.
    """

    axes: tuple[Axis, ...]
    first: int
    split: int
    chunk: int

    @staticmethod
    def of(leaf: Any) -> "_Blocks":
        named = tree.is_named(leaf)
        axes = leaf.axes if named else tuple(Axis(f"{_UNNAMED}{n}", size) for n, size in enumerate(leaf.shape))
        # The first axis of an array without names may be that of layers.
        kept = [n + 1 for n, axis in enumerate(axes) if axis.name in STACKED_LAYERS] if named else [int(len(axes) > 1)]
        least = max(kept, default=0)
        wholes = (n for n in reversed(range(least, len(axes))) if _size(axes[n:]) % BLOCK_SIZE == 0)
        first = next(wholes, least)
        shards = _num_shards(axes)
        split = next((n for n in reversed(range(first, len(axes))) if shards[n] > 1), first)
        chunk = math.gcd(BLOCK_SIZE, _size(axes[split:]) // math.prod(shards[split : split + 1]))
        return _Blocks(axes, first, split, chunk)

    @property
    def absmax_axes(self) -> tuple[Axis, ...]:
        return (*self.axes[: self.first], Axis(self.axes[self.first].name, self._num_blocks))

    def largest(self, array: jax.Array) -> jax.Array:
        """The largest element of each block, with the shape of `absmax_axes`."""
        of_chunks = self._placed(jnp.max(array.reshape(*self._chunks_shape, self.chunk), -1))
        flat = of_chunks.reshape(*_shape(self.axes[: self.first]), -1)
        missing = self._num_blocks * self._chunks_per_block - flat.shape[-1]
        padded = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, missing)]) if missing else flat
        return jnp.max(padded.reshape(*flat.shape[:-1], self._num_blocks, self._chunks_per_block), -1)

    def by_element(self, of_blocks: jax.Array) -> jax.Array:
        """A number of each block for each element of the array."""
        flat = jnp.repeat(of_blocks, self._chunks_per_block, -1)[..., : _size(self.axes[self.first :]) // self.chunk]
        of_chunks = self._placed(flat.reshape(self._chunks_shape))
        return jnp.broadcast_to(of_chunks[..., None], (*of_chunks.shape, self.chunk)).reshape(_shape(self.axes))

    @property
    def _num_blocks(self) -> int:
        return -(-_size(self.axes[self.first :]) // BLOCK_SIZE)

    @property
    def _chunks_per_block(self) -> int:
        return BLOCK_SIZE // self.chunk

    @property
    def _chunks_shape(self) -> tuple[int, ...]:
        return (*_shape(self.axes[: self.split]), _size(self.axes[self.split :]) // self.chunk)

    def _placed(self, of_chunks: jax.Array) -> jax.Array:
        """A number of each chunk, on the device that has the chunk."""
        layout = current_layout()
        if layout is None or layout.mesh.size == 1:
            return of_chunks
        spec = layout.parameter_sharding(self.axes).spec[: self.split + 1]
        return jax.lax.with_sharding_constraint(of_chunks, NamedSharding(layout.mesh, PartitionSpec(*spec)))


def _num_shards(axes: tuple[Axis, ...]) -> list[int]:
    layout = current_layout()
    if layout is None:
        return [1] * len(axes)
    spec = layout.parameter_sharding(axes).spec
    return [math.prod(layout.mesh.shape[name] for name in axis_names(entry)) for entry in spec]


def _size(axes: tuple[Axis, ...]) -> int:
    return math.prod(_shape(axes))


def _shape(axes: tuple[Axis, ...]) -> tuple[int, ...]:
    return tuple(axis.size for axis in axes)
