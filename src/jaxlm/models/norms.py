"""Normalisation over features, keeping its input and what it found of each row for the backward pass.

Left to automatic differentiation, a norm stores several float32 copies of its input. The derivatives written down here
make them again from the input itself, in the dtype that the residual stream has. Mean and scale of a row are kept: two
numbers, without which the backward pass would first read all of the input, and write a float32 copy of it between the sum
over features and that over rows.

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

from jaxlm.core.custom_vjp import CustomVjp

NORM = "norm"
"""Mean and scale of each row, by the name that recomputation policies know."""


_OUTPUT = "norm_output"


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


class _Row(NamedTuple):
    """What a norm finds of each row: float32 [..., 1]. The mean is None where nothing is subtracted."""

    mean: jax.Array | None
    scale: jax.Array


def _row(eps: float, centre: bool, x_D: jax.Array) -> _Row:
    x_D = x_D.astype(jnp.float32)
    mean = jnp.mean(x_D, axis=-1, keepdims=True) if centre else None
    centred_D = x_D if mean is None else x_D - mean
    return _Row(mean, jax.lax.rsqrt(jnp.mean(centred_D * centred_D, axis=-1, keepdims=True) + eps))


def _standardised(x_D: jax.Array, row: _Row) -> jax.Array:
    """x as it stands before the weights, float32."""
    x_D = x_D.astype(jnp.float32)
    return (x_D if row.mean is None else x_D - row.mean) * row.scale


def _weighted(x_D, row: _Row, weight_D, bias_D):
    out_D = _standardised(x_D, row) * weight_D.astype(jnp.float32)
    return (out_D if bias_D is None else out_D + bias_D.astype(jnp.float32)).astype(x_D.dtype)


@functools.partial(CustomVjp, nondiff_argnums=(0, 1))
def _norm(eps, centre, x_D, weight_D, bias_D):
    return _weighted(x_D, _row(eps, centre, x_D), weight_D, bias_D)


def _norm_forward(eps, centre, x_D, weight_D, bias_D):
    row = jax.tree.map(lambda a: checkpoint_name(a, NORM), _row(eps, centre, x_D))
    # By this name the output can be kept as it is, not in float32 from before it was rounded.
    out_D = checkpoint_name(_weighted(x_D, row, weight_D, bias_D), _OUTPUT)
    return out_D, (x_D, row, weight_D, bias_D)


def _norm_backward(eps, centre, kept, d_out_D):
    x_D, row, weight_D, bias_D = kept
    standard_D = _standardised(x_D, row)
    d_out_D = d_out_D.astype(jnp.float32)
    leading = tuple(range(d_out_D.ndim - 1))
    d_weight = jnp.sum(d_out_D * standard_D, axis=leading).astype(weight_D.dtype)
    d_bias = None if bias_D is None else jnp.sum(d_out_D, axis=leading).astype(bias_D.dtype)
    d_standard_D = d_out_D * weight_D.astype(jnp.float32)
    along = jnp.mean(d_standard_D * standard_D, axis=-1, keepdims=True)
    d_x_D = d_standard_D - standard_D * along
    if centre:
        d_x_D = d_x_D - jnp.mean(d_standard_D, axis=-1, keepdims=True)
    return (d_x_D * row.scale).astype(x_D.dtype), d_weight, d_bias


_norm.defvjp(_norm_forward, _norm_backward)
