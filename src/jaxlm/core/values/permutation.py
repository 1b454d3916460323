"""Tokens that are not in the order of the text: what depends on a token's neighbors, or on its place in the text.

`order` is int32 {.., position}, the index of each token in its row; None if tokens are in the order of the text. Arrays have
its axes, and maybe more.
"""

from collections.abc import Callable

from jaxlm.core.imports import haliax as hax

import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import POSITION


def in_text_order(x: NamedArray, order: NamedArray | None) -> NamedArray:
    """Puts the tokens of a row into the order of the text."""
    return x if order is None else _taken(x, order, _inverse)


def in_row_order(x: NamedArray, order: NamedArray | None) -> NamedArray:
    """Puts the tokens of a text into the order of the row: the inverse of `in_text_order`."""
    return x if order is None else _taken(x, order, lambda order: order)


def text_index(x: NamedArray, order: NamedArray | None) -> NamedArray:
    """The index of each token in the text, int32 {position} or {.., position}. Args: x: has the tokens."""
    return hax.arange(x.resolve_axis(POSITION)) if order is None else order


def previous(x: NamedArray, order: NamedArray | None, first: NamedArray | float = 0) -> NamedArray:
    """Returns what the token before each one in the text has. Args: first: what the first of a row gets, {position: 1}."""
    places = [axis.name for axis in x.axes]
    if not isinstance(first, NamedArray):
        first = hax.full([axis.resize(1) if axis.name == POSITION else axis for axis in x.axes], first, dtype=x.dtype)
    first = first.rearrange(places)
    if order is None:
        at = places.index(POSITION)
        kept = jax.lax.slice_in_dim(x.array, 0, x.axes[at].size - 1, axis=at)
        return NamedArray(jnp.concatenate([first.array, kept], axis=at), x.axes)
    before = _taken(x, order, lambda order: jnp.take_along_axis(_inverse(order), jnp.maximum(order - 1, 0), axis=-1))
    is_first = NamedArray(order.array == 0, order.axes)
    return hax.where(is_first, first[POSITION, 0], before).rearrange(x.axes)


def following(x: NamedArray, order: NamedArray | None) -> NamedArray:
    """Returns what the token after each one in the text has. The last of a row gets 0."""
    at = [axis.name for axis in x.axes].index(POSITION)
    size = x.axes[at].size
    if order is None:
        later = jax.lax.slice_in_dim(x.array, 1, size, axis=at)
        return NamedArray(jnp.pad(later, [(0, int(dim == at)) for dim in range(x.ndim)]), x.axes)
    after = _taken(
        x, order, lambda order: jnp.take_along_axis(_inverse(order), jnp.minimum(order + 1, size - 1), axis=-1)
    )
    is_last = NamedArray(order.array == size - 1, order.axes)
    return hax.where(is_last, 0, after).rearrange(x.axes)


def _inverse(order: jax.Array) -> jax.Array:
    return jnp.argsort(order, axis=-1)


def _taken(x: NamedArray, order: NamedArray, index_of: Callable[[jax.Array], jax.Array]) -> NamedArray:
    """x with `x[index]` at each position. Args: index_of: the index from the order [.., position]."""
    order = order.rearrange((..., POSITION))
    moved = x.rearrange((*order.axes, ...))
    index = index_of(order.array)
    index = index.reshape(*index.shape, *[1] * (moved.ndim - index.ndim))
    taken = jnp.take_along_axis(moved.array, index, axis=order.ndim - 1)
    return NamedArray(taken, moved.axes).rearrange(x.axes)
