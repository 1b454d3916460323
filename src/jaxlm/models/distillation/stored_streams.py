"""Streams of layers as 8-bit integers, to keep them on disk."""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import BATCH, LAYERS, POSITION
from jaxlm.models.distillation.layerwise import LayerStreams

_LARGEST = 127
_VECTORS = (LAYERS, BATCH, POSITION)


class Int8Array(eqx.Module):
    """Vectors with a scale each, rounded to the nearest of 255 numbers.

    Attributes:
        values: int8 {layers, batch, position, embed}.
        scale: float32 {layers, batch, position}; 1 for a vector of zeros.
    """

    values: NamedArray
    scale: NamedArray

    @staticmethod
    def of(array: NamedArray) -> "Int8Array":
        array = array.astype(jnp.float32)
        features = [axis for axis in array.axes if axis.name not in _VECTORS]
        largest = hax.max(hax.abs(array), features)
        scale = hax.where(largest == 0, 1.0, largest / _LARGEST)
        return Int8Array(hax.round(array / scale).astype(jnp.int8), scale)

    def floats(self, dtype: jnp.dtype) -> NamedArray:
        """The vectors, with errors of at most half a scale."""
        return (self.values.astype(jnp.float32) * self.scale).rearrange(self.values.axes).astype(dtype)


class Int8Streams(eqx.Module):
    """`LayerStreams` in 8 bits.

    Attributes:
        dtype: of the streams that they were made of.
    """

    inputs: Int8Array
    targets: Int8Array
    dtype: jnp.dtype = eqx.field(static=True)

    @staticmethod
    def of(streams: LayerStreams) -> "Int8Streams":
        return Int8Streams(Int8Array.of(streams.inputs), Int8Array.of(streams.targets), streams.inputs.dtype)

    def floats(self) -> LayerStreams:
        """The streams, rounded."""
        return LayerStreams(self.inputs.floats(self.dtype), self.targets.floats(self.dtype))
