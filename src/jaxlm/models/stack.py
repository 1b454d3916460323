"""A loop over stacked layers that keeps nothing twice.

`haliax.scan` names each layer's slice of the parameters before the layer sees it. What the backward pass needs of a
layer is then the named copy and not the slice itself, and the loop stores all of them: every parameter once more, and
gathered from all devices under FSDP. Here the slices are passed on as they are, and the backward pass reads them again
from the stacked parameters.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

Carry = TypeVar("Carry")


_UNROLLED_AT_MOST = 32


def in_a_loop(scan: bool | str, num_layers: int, *, platform: str, num_devices: int) -> tuple[bool, str]:
    """Whether to run layers in a loop rather than each compiled on its own, and why.

    A loop compiles in constant time and needs the least memory; on one GPU without it XLA overlaps and fuses across
    layers, at the price of compiling each.
    """
    if scan != "auto":
        return bool(scan), f"model.scan_layers: {str(scan).lower()}"
    if platform == "gpu" and num_devices == 1 and num_layers <= _UNROLLED_AT_MOST:
        return False, f"one GPU, {num_layers} layers"
    return True, "compiles once for all layers"


def scan_layers(
    body: Callable[..., tuple[Carry, Any]],
    carry: Carry,
    per_layer: tuple,
    Layers: Axis,
    *,
    unroll: bool,
    period: int = 1,
) -> tuple[Carry, Any]:
    """`carry, out = body(place, carry, *slices)` for one layer after the other.

    Args:
        per_layer: trees; named arrays with the axis `Layers` and plain arrays (along their first axis) are sliced,
            everything else is given to each layer as it is.
        unroll: every layer compiled on its own instead of a loop.
        period: layers that differ in how they compute repeat after so many; `place` is a layer's index within the
            period. The loop compiles one period; layers left over at the end are compiled on their own.

    Returns:
        The last carry, and the named arrays of every `out`, stacked along `Layers`.
    """
    leaves, structure = jax.tree.flatten(per_layer, is_leaf=_is_named)
    stacked = [leaf if _is_stacked(leaf, Layers) else None for leaf in leaves]
    out_structure, out_axes = jax.tree.structure(None), []

    def one(place: int, carry, arrays):
        nonlocal out_structure, out_axes
        slices = [
            leaf if whole is None else _slice(whole, array, Layers)
            for leaf, whole, array in zip(leaves, stacked, arrays, strict=True)
        ]
        carry, out = body(place, carry, *jax.tree.unflatten(structure, slices))
        named, out_structure = jax.tree.flatten(out, is_leaf=_is_named)
        out_axes = [leaf.axes for leaf in named]
        return carry, [leaf.array for leaf in named]

    xs = [None if leaf is None else _layers_first(leaf, Layers) for leaf in stacked]
    carry, arrays = _in_periods(one, carry, xs, Layers.size, period, unroll)
    out = [NamedArray(array, (Layers, *axes)) for array, axes in zip(arrays, out_axes, strict=True)]
    return carry, jax.tree.unflatten(out_structure, out)


def _in_periods(one: Callable, carry: Any, xs: list, num_layers: int, period: int, unroll: bool) -> tuple[Any, list]:
    if period == 1:
        return jax.lax.scan(functools.partial(one, 0), carry, xs, length=num_layers, unroll=unroll or 1)

    def some(carry, arrays, places: int):
        outs = []
        for place in range(places):
            carry, out = one(place, carry, jax.tree.map(lambda x, i=place: x[i], arrays))
            outs.append(out)
        return carry, [jnp.stack(column) for column in zip(*outs, strict=True)]

    num_periods, rest = divmod(num_layers, period)
    looped = num_layers - rest
    grouped = jax.tree.map(lambda x: x[:looped].reshape(num_periods, period, *x.shape[1:]), xs)
    carry, outs = jax.lax.scan(
        lambda carry, arrays: some(carry, arrays, period), carry, grouped, length=num_periods, unroll=unroll or 1
    )
    outs = [x.reshape(looped, *x.shape[2:]) for x in outs]
    if rest:
        carry, last = some(carry, jax.tree.map(lambda x: x[looped:], xs), rest)
        outs = [jnp.concatenate(parts) for parts in zip(outs, last, strict=True)]
    return carry, outs


def _is_named(leaf: Any) -> bool:
    return isinstance(leaf, NamedArray)


def _is_stacked(leaf: Any, Layers: Axis) -> bool:
    return leaf.has_axis(Layers) if _is_named(leaf) else eqx.is_array(leaf)


def _layers_first(leaf: Any, Layers: Axis) -> jax.Array:
    return leaf.rearrange((Layers, ...)).array if _is_named(leaf) else leaf


def _slice(whole: Any, array: jax.Array, Layers: Axis) -> Any:
    if not _is_named(whole):
        return array
    return NamedArray(array, tuple(axis for axis in whole.axes if axis.name != Layers.name))
