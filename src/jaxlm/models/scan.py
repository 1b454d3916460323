"""Runs layers of the same structure as a scan or unrolled.

`haliax.scan` attaches axis names to each layer's slice of the parameters before the layer runs. The backward pass then
saves the named copy instead of the slice, so the loop stores all parameters a second time, gathered from all devices
under FSDP. This module passes plain slices, and the backward pass reads them again from the stacked parameters.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.tree import is_named

Carry = TypeVar("Carry")
_MAX_UNROLLED = 32


def runs_as_scan(scan: bool | str, num_layers: int, *, platform: str, num_devices: int) -> tuple[bool, str]:
    """Whether to run the layers as a scan instead of unrolled, and why.

    A scan compiles in constant time and needs the least memory. Unrolled on one GPU, XLA overlaps and fuses across
    layers, at the cost of compiling each layer.
    """
    if scan != "auto":
        return bool(scan), f"model.scan_layers: {str(scan).lower()}"
    if platform == "gpu" and num_devices == 1 and num_layers <= _MAX_UNROLLED:
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
    """Runs `carry, out = body(kind_index, carry, *slices)` for one layer after the other.

    Args:
        per_layer: pytrees. Named arrays with the axis `Layers` and plain arrays (along their first axis) are sliced;
            everything else is passed to each layer unchanged.
        unroll: compile every layer separately instead of a loop.
        period: number of layers after which the kinds of layers repeat; `kind_index` is a layer's index within the
            period. The loop body is one period. Layers left over at the end are compiled separately.

    Returns:
        The last carry, and the named arrays of every `out`, stacked along `Layers`.
    """
    leaves, structure = jax.tree.flatten(per_layer, is_leaf=is_named)
    stacked = [leaf if _is_stacked(leaf, Layers) else None for leaf in leaves]
    out_structure, out_axes = jax.tree.structure(None), []

    def one_layer(kind_index: int, carry, arrays):
        nonlocal out_structure, out_axes
        slices = [
            leaf if whole is None else _slice(whole, array, Layers)
            for leaf, whole, array in zip(leaves, stacked, arrays, strict=True)
        ]
        carry, out = body(kind_index, carry, *jax.tree.unflatten(structure, slices))
        named, out_structure = jax.tree.flatten(out, is_leaf=is_named)
        out_axes = [leaf.axes for leaf in named]
        return carry, [leaf.array for leaf in named]

    xs = [None if leaf is None else _layers_first(leaf, Layers) for leaf in stacked]
    carry, arrays = _scan_periods(one_layer, carry, xs, Layers.size, period, unroll)
    out = [NamedArray(array, (Layers, *axes)) for array, axes in zip(arrays, out_axes, strict=True)]
    return carry, jax.tree.unflatten(out_structure, out)


def _scan_periods(
    one_layer: Callable, carry: Any, xs: list, num_layers: int, period: int, unroll: bool
) -> tuple[Any, list]:
    if period == 1:
        return jax.lax.scan(functools.partial(one_layer, 0), carry, xs, length=num_layers, unroll=unroll or 1)

    def several_layers(carry, arrays, count: int):
        outs = []
        for kind_index in range(count):
            carry, out = one_layer(kind_index, carry, jax.tree.map(lambda x, i=kind_index: x[i], arrays))
            outs.append(out)
        return carry, [jnp.stack(parts) for parts in zip(*outs, strict=True)]

    num_periods, num_rest = divmod(num_layers, period)
    num_scanned = num_layers - num_rest
    grouped = jax.tree.map(lambda x: x[:num_scanned].reshape(num_periods, period, *x.shape[1:]), xs)
    one_period = functools.partial(several_layers, count=period)
    carry, outs = jax.lax.scan(one_period, carry, grouped, length=num_periods, unroll=unroll or 1)
    outs = [x.reshape(num_scanned, *x.shape[2:]) for x in outs]
    if num_rest:
        carry, rest = several_layers(carry, jax.tree.map(lambda x: x[num_scanned:], xs), num_rest)
        outs = [jnp.concatenate(parts) for parts in zip(outs, rest, strict=True)]
    return carry, outs


def _is_stacked(leaf: Any, Layers: Axis) -> bool:
    return leaf.has_axis(Layers) if is_named(leaf) else eqx.is_array(leaf)


def _layers_first(leaf: Any, Layers: Axis) -> jax.Array:
    return leaf.rearrange((Layers, ...)).array if is_named(leaf) else leaf


def _slice(whole: Any, array: jax.Array, Layers: Axis) -> Any:
    if not is_named(whole):
        return array
    return NamedArray(array, tuple(axis for axis in whole.axes if axis.name != Layers.name))
