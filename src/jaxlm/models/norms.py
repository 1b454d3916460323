"""RMSNorm and LayerNorm with custom backward passes that save the input and two statistics per row.

Under automatic differentiation, a norm saves several float32 copies of its input. The backward passes here recompute
them from the input, in the dtype of the residual stream. The mean and scale of each row are saved: without them, the
backward pass would read the input one more time and write a float32 copy of it between the sum over features and the
sum over rows.

Shapes: ... any leading axes, D features.
"""

import functools
from typing import Any, NamedTuple

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSpec, NamedArray
from jax.ad_checkpoint import checkpoint_name

from jaxlm.core.parameters import VECTOR, DeclaresParameters, Parameter
from jaxlm.core.tracing import CustomVjp

NORM = "norm"
"""Checkpoint name of the mean and scale of each row in remat policies."""
_OUTPUT = "norm_output"


class RMSNorm(DeclaresParameters):
    """x / rms(x) * (offset + weight), in float32.

    Source: Zhang & Sennrich 2019 (arXiv:1910.07467), equation 4.

    Attributes:
        weight: {*features}; the mean square is taken over all of these axes.
        offset: 1 in families whose weight is the difference from 1 (Gemma), so that weight decay pulls towards 1.
    """

    weight: NamedArray
    eps: float = eqx.field(static=True)
    offset: float = eqx.field(static=True, default=0.0)

    @staticmethod
    def init(Features: AxisSpec, eps: float, *, offset: float = 0.0) -> "RMSNorm":
        """Initializes a norm that multiplies by 1."""
        return RMSNorm(hax.full(Features, 1.0 - offset), eps, offset)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps {..., *features} to the same shape."""
        weight = self.weight.astype(jnp.float32) + self.offset if self.offset else self.weight
        return _normalized(x, weight, None, self.eps, center=False)

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": VECTOR}


class UnweightedRMSNorm(eqx.Module):
    """x / rms(x), in float32: an RMSNorm without parameters."""

    Features: Axis = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        return _normalized(x, hax.ones(self.Features), None, self.eps, center=False)


class LayerNorm(DeclaresParameters):
    """(x - mean) / std * weight + bias, in float32.

    Source: Ba et al. 2016 (arXiv:1607.06450), equations 3 and 4.
    """

    weight: NamedArray
    bias: NamedArray | None
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(Embed: Axis, eps: float, *, use_bias: bool) -> "LayerNorm":
        """Initializes weights to 1 and biases to 0."""
        return LayerNorm(hax.ones(Embed), hax.zeros(Embed) if use_bias else None, eps)

    def __call__(self, x: NamedArray) -> NamedArray:
        return _normalized(x, self.weight, self.bias, self.eps, center=True)

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": VECTOR, "bias": VECTOR}


class UnweightedLayerNorm(eqx.Module):
    """(x - mean) / std, in float32: a LayerNorm without parameters."""

    Features: Axis = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        return _normalized(x, hax.ones(self.Features), None, self.eps, center=True)


class HeadwiseLayerNorm(DeclaresParameters):
    """(x - mean) / std * weight for each head's features, in float32. Each head has its own weights.

    Attributes:
        weight: {heads, head_size}, with the heads of queries or those of keys.
    """

    weight: NamedArray
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(Heads: Axis, HeadSize: Axis, eps: float) -> "HeadwiseLayerNorm":
        """Initializes weights to 1."""
        return HeadwiseLayerNorm(hax.ones((Heads, HeadSize)), eps)

    def __call__(self, x: NamedArray) -> NamedArray:
        last = x.rearrange((..., *self.weight.axes))
        norm = jax.vmap(lambda x_D, weight_D: _norm(self.eps, True, x_D, weight_D, None), in_axes=(-2, 0), out_axes=-2)
        return NamedArray(norm(last.array, self.weight.array), last.axes).rearrange(x.axes)

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": VECTOR}


Norm = RMSNorm | UnweightedRMSNorm | LayerNorm | UnweightedLayerNorm


def _normalized(x: NamedArray, weight: NamedArray, bias: NamedArray | None, eps: float, *, center: bool) -> NamedArray:
    last = x.rearrange((..., *weight.axes))
    shape = last.array.shape
    flat_D = last.array.reshape(*shape[: len(shape) - weight.ndim], -1)
    out: Any = _norm(eps, center, flat_D, weight.array.ravel(), None if bias is None else bias.array.ravel())
    return NamedArray(out.reshape(shape), last.axes).rearrange(x.axes)


class _RowStats(NamedTuple):
    """Statistics of each row, float32 [..., 1]. The mean is None if it is not subtracted."""

    mean: jax.Array | None
    scale: jax.Array


def _row_stats(eps: float, center: bool, x_D: jax.Array) -> _RowStats:
    x_D = x_D.astype(jnp.float32)
    mean = jnp.mean(x_D, axis=-1, keepdims=True) if center else None
    centered_D = x_D if mean is None else x_D - mean
    return _RowStats(mean, jax.lax.rsqrt(jnp.mean(centered_D * centered_D, axis=-1, keepdims=True) + eps))


def _standardized(x_D: jax.Array, stats: _RowStats) -> jax.Array:
    """x normalized, before weight and bias; float32."""
    x_D = x_D.astype(jnp.float32)
    return (x_D if stats.mean is None else x_D - stats.mean) * stats.scale


def _weighted(x_D, stats: _RowStats, weight_D, bias_D):
    out_D = _standardized(x_D, stats) * weight_D.astype(jnp.float32)
    return (out_D if bias_D is None else out_D + bias_D.astype(jnp.float32)).astype(x_D.dtype)


@functools.partial(CustomVjp, nondiff_argnums=(0, 1))
def _norm(eps, center, x_D, weight_D, bias_D):
    return _weighted(x_D, _row_stats(eps, center, x_D), weight_D, bias_D)


def _norm_forward(eps, center, x_D, weight_D, bias_D):
    stats = jax.tree.map(lambda a: checkpoint_name(a, NORM), _row_stats(eps, center, x_D))
    # The name lets a policy save the output in its own dtype, not the float32 value before the cast.
    out_D = checkpoint_name(_weighted(x_D, stats, weight_D, bias_D), _OUTPUT)
    return out_D, (x_D, stats, weight_D, bias_D)


def _norm_backward(eps, center, residuals, d_out_D):
    x_D, stats, weight_D, bias_D = residuals
    standard_D = _standardized(x_D, stats)
    d_out_D = d_out_D.astype(jnp.float32)
    leading = tuple(range(d_out_D.ndim - 1))
    d_weight = jnp.sum(d_out_D * standard_D, axis=leading).astype(weight_D.dtype)
    d_bias = None if bias_D is None else jnp.sum(d_out_D, axis=leading).astype(bias_D.dtype)
    d_standard_D = d_out_D * weight_D.astype(jnp.float32)
    projection = jnp.mean(d_standard_D * standard_D, axis=-1, keepdims=True)
    d_x_D = d_standard_D - standard_D * projection
    if center:
        d_x_D = d_x_D - jnp.mean(d_standard_D, axis=-1, keepdims=True)
    return (d_x_D * stats.scale).astype(x_D.dtype), d_weight, d_bias


_norm.defvjp(_norm_forward, _norm_backward)
