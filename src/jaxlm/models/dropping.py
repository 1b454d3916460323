"""Layers that drop a part of their input while the model learns, and the keys by which they draw what.

Whoever calls such a layer knows nothing of it: the body of a model gives each its own key before it runs a block, and none
where nothing is learned. So a layer that drops something can stand wherever one that does not stood.
"""

import abc
import itertools
import zlib
from typing import TypeVar

import equinox as eqx
import jax

from jaxlm.core import tree

T = TypeVar("T")
# Blocks split their key for what they draw themselves; folded with this, it gives other keys than those.
_APART = zlib.crc32(b"layers that drop")


class Dropping(eqx.Module):
    """A layer that drops nothing until it has a key."""

    @abc.abstractmethod
    def with_key(self, key: jax.Array) -> "Dropping":
        """The same layer, drawing by this key."""


def with_keys(block: T, key: jax.Array | None) -> T:
    """The block with a key of its own in every layer that drops something; without a key, the block as it is."""
    if key is None or not tree.modules(block, Dropping):
        return block
    apart, number = jax.random.fold_in(key, _APART), itertools.count()
    return tree.map_modules(
        block, Dropping, ".*", lambda layer: layer.with_key(jax.random.fold_in(apart, next(number)))
    )
