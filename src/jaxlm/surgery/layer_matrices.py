"""Named parameters as matrices of plain arrays, layer by layer, for decompositions."""

from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.sharding import current_layout


def by_layer(compute: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Runs on one layer after the other, whole on every device: decompositions are not sharded."""
    layout = current_layout()

    def one(layer: tuple[jax.Array, ...]) -> Any:
        if layout is not None:
            layer = jax.lax.with_sharding_constraint(layer, layout.replicated())
        return compute(*layer)

    return jax.lax.map(one, arrays)


def flat(array: NamedArray, *groups: tuple[hax.Axis, ...]) -> jax.Array:
    """The float32 array with one dimension for each group of axes."""
    ordered = array.rearrange(tuple(axis for group in groups for axis in group)).array.astype(jnp.float32)
    return ordered.reshape([hax.axis_size(group) for group in groups])


def named(array: jax.Array, like: NamedArray) -> NamedArray:
    """The array with the axes of another one. Args: array: in any shape of as many elements."""
    return NamedArray(array.reshape(like.array.shape), like.axes)
