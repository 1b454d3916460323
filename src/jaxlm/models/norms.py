"""Normalisation over features, keeping its input and nothing else for the backward pass.

Left to automatic differentiation, a norm stores several float32 copies of its input. The derivatives written down here
make them again from the input itself, in the dtype that the residual stream has.

Shapes: ... any leading axes, D features.
"""

import functools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSpec, NamedArray

from jaxlm.core.derivatives import OwnBackward


class RMSNorm(eqx.Module):
    """x / rms(x) * (offset + weight), in float32.

    Source: Zhang & Sennrich 2019 (arXiv:1910.07467), equation 4.

    Attributes:
        weight: {*features}, over all of which the mean square is taken.
        offset: 1 in the families that learn the distance from 1 (Gemma), so that weight decay pulls towards 1.
    """

    weight: NamedArray
    eps: float = eqx.field(static=True)
    offset: float = eqx.field(static=True, default=0.0)

    @staticmethod
    def init(Features: AxisSpec, eps: float, *, offset: float = 0.0) -> "RMSNorm":
        """Multiplies by 1."""
        return RMSNorm(hax.full(Features, 1.0 - offset), eps, offset)

    def __call__(self, x: NamedArray) -> NamedArray:
        """{..., *features} to the same."""
        weight = self.weight.astype(jnp.float32) + self.offset if self.offset else self.weight
        return _normed(x, weight, None, self.eps, centre=False)


class LayerNorm(eqx.Module):
    """(x - mean) / std * weight + bias, in float32.

    Source: Ba et al. 2016 (arXiv:1607.06450), equations 3 and 4.
    """

    weight: NamedArray
    bias: NamedArray | None
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(Embed: Axis, eps: float, *, use_bias: bool) -> "LayerNorm":
        """Weights of 1, biases of 0."""
        return LayerNorm(hax.ones(Embed), hax.zeros(Embed) if use_bias else None, eps)

    def __call__(self, x: NamedArray) -> NamedArray:
        """{..., embed} to the same."""
        return _normed(x, self.weight, self.bias, self.eps, centre=True)


def _normed(x: NamedArray, weight: NamedArray, bias: NamedArray | None, eps: float, *, centre: bool) -> NamedArray:
    last = x.rearrange((..., *weight.axes))
    shape = last.array.shape
    flat_D = last.array.reshape(*shape[: len(shape) - weight.ndim], -1)
    out: Any = _norm(eps, centre, flat_D, weight.array.ravel(), None if bias is None else bias.array.ravel())
    return NamedArray(out.reshape(shape), last.axes).rearrange(x.axes)


def _standardised(eps: float, centre: bool, x_D: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as it stands before the weights, float32, and what it was multiplied by."""
    x_D = x_D.astype(jnp.float32)
    if centre:
        x_D = x_D - jnp.mean(x_D, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(x_D * x_D, axis=-1, keepdims=True) + eps)
    return x_D * scale, scale


@functools.partial(OwnBackward, nondiff_argnums=(0, 1))
def _norm(eps, centre, x_D, weight_D, bias_D):
    out_D = _standardised(eps, centre, x_D)[0] * weight_D.astype(jnp.float32)
    return (out_D if bias_D is None else out_D + bias_D.astype(jnp.float32)).astype(x_D.dtype)


def _norm_forward(eps, centre, x_D, weight_D, bias_D):
    return _norm(eps, centre, x_D, weight_D, bias_D), (x_D, weight_D, bias_D)


def _norm_backward(eps, centre, kept, d_out_D):
    x_D, weight_D, bias_D = kept
    standard_D, scale = _standardised(eps, centre, x_D)
    d_out_D = d_out_D.astype(jnp.float32)
    leading = tuple(range(d_out_D.ndim - 1))
    d_weight = jnp.sum(d_out_D * standard_D, axis=leading).astype(weight_D.dtype)
    d_bias = None if bias_D is None else jnp.sum(d_out_D, axis=leading).astype(bias_D.dtype)
    d_standard_D = d_out_D * weight_D.astype(jnp.float32)
    along = jnp.mean(d_standard_D * standard_D, axis=-1, keepdims=True)
    d_x_D = d_standard_D - standard_D * along
    if centre:
        d_x_D = d_x_D - jnp.mean(d_standard_D, axis=-1, keepdims=True)
    return (d_x_D * scale).astype(x_D.dtype), d_weight, d_bias


_norm.defvjp(_norm_forward, _norm_backward)
