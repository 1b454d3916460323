"""Norms of trees of arrays, and of their stacked layers."""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS

_IN_STACK = ".layers."  # of a parameter's path: what comes before names its stack


def norm(arrays: Any) -> jax.Array:
    """The norm of all arrays of a tree together, float32."""
    squares = (jnp.sum(_squared(tree.raw(leaf))) for _, leaf in tree.leaves(arrays))
    return jnp.sqrt(sum(squares, jnp.zeros(())))


def layer_norms(arrays: Any) -> jax.Array:
    """The norm of each layer, float32 [number of layers], over all stacks of layers.

    Arrays outside of stacks belong to no layer: embeddings, and those with a few numbers for each layer beside its stack.
    """
    squares: dict[str, Any] = defaultdict(float)
    for path, leaf in tree.leaves(arrays):
        stack, _, inside = path.partition(_IN_STACK)
        names = [axis.name for axis in leaf.axes] if tree.is_named(leaf) and inside else []
        if LAYERS in names:
            others = tuple(number for number, name in enumerate(names) if name != LAYERS)
            squares[stack] += jnp.sum(_squared(leaf.array), axis=others)
    return jnp.sqrt(jnp.concatenate([jnp.zeros(0), *squares.values()]))


def layer_ratio(arrays: Any) -> jax.Array:
    """The largest norm of a layer over the median of the layers. 1 without stacks of layers, or if the median is 0."""
    norms = layer_norms(arrays)
    if not norms.size:
        return jnp.ones(())
    median = jnp.median(norms)
    return jnp.where(median > 0, jnp.max(norms) / jnp.where(median > 0, median, 1.0), 1.0)


def _squared(array: jax.Array) -> jax.Array:
    return jnp.square(array.astype(jnp.float32))
