"""Named parameters as matrices of plain arrays, layer by layer, for decompositions."""

from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import EMBED, HEAD_SIZE, LAYERS
from jaxlm.core.sharding import replicated
from jaxlm.models.linear import Linear


def by_layer(compute: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Runs on one layer after the other, whole on every device: decompositions are not sharded."""
    return jax.lax.map(lambda layer: compute(*replicated(layer)), arrays)


def flat(array: NamedArray, *groups: tuple[hax.Axis, ...]) -> jax.Array:
    """The float32 array with one dimension for each group of axes."""
    ordered = array.rearrange(tuple(axis for group in groups for axis in group)).array.astype(jnp.float32)
    return ordered.reshape([hax.axis_size(group) for group in groups])


def heads_of_layers(layer: Linear, heads: str) -> jax.Array:
    """Reads a float32 weight [layers, heads, D, I]. With a bias, the last input is 1. Args: heads: their axis."""
    groups = [(layer.weight.resolve_axis(name),) for name in (LAYERS, heads, HEAD_SIZE, EMBED)]
    weight = flat(layer.weight, *groups)  # pyright: ignore[reportArgumentType]
    return (
        weight if layer.bias is None else jnp.concatenate([weight, flat(layer.bias, *groups[:3])[..., None]], axis=-1)
    )


def named(array: jax.Array, like: NamedArray) -> NamedArray:
    """The array with the axes of another one. Args: array: in any shape of as many elements."""
    return NamedArray(array.reshape(like.array.shape), like.axes)
