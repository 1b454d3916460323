"""Runs layers of the same structure as a scan or unrolled, in segments that repeat a pattern.

`haliax.scan` attaches axis names to each layer's slice of the parameters before the layer runs. The backward pass then
saves the named copy instead of the slice, so the loop stores all parameters a second time, gathered from all devices
under FSDP. This module passes plain slices, and the backward pass reads them again from the stacked parameters.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.tree import is_named
from jaxlm.models.remat import RematPolicy, offloads

T = TypeVar("T")
Carry = TypeVar("Carry")
PatternLayer = tuple[int, Any]
"""The number of a layer's stack, and its kind."""


@dataclass(frozen=True)
class Segment:
    """Consecutive layers that repeat a pattern, which run as one scan over its repetitions.

    Attributes:
        start: number of the first layer.
        pattern: the layers of one repetition.
        repeats: how often they repeat.
    """

    start: int
    pattern: tuple[PatternLayer, ...]
    repeats: int

    @property
    def stop(self) -> int:
        """One more than the number of the last layer."""
        return self.start + len(self.pattern) * self.repeats


def segments(layers: Sequence[PatternLayer], start: int = 0) -> list[Segment]:
    """Divides layers into segments such that as few layers as possible are compiled, in as few segments as possible, of which
    the first ones are the longest.

    Layers of several stacks are in one segment only if they repeat: the backward pass can end between two segments, at
    layers that are frozen.

    Args:
        layers: from first to last.
        start: number of the first layer.
    """
    kinds = list(dict.fromkeys(kind for _, kind in layers))
    return [
        Segment(start + first, tuple(layers[first : first + period]), repeats)
        for first, period, repeats in _divided(tuple((stack, kinds.index(kind)) for stack, kind in layers))
    ]


def shortest_period(kinds: Sequence[T]) -> tuple[T, ...]:
    """The shortest prefix of `kinds` that repeats to give all of them. The last repetition may be partial."""
    return next(
        tuple(kinds[:period])
        for period in range(1, len(kinds) + 1)
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds))
    )


@functools.lru_cache
def _divided(layers: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """(first layer, period, repeats) of each segment, by dynamic programming from the last layer to the first."""
    best: dict[int, tuple[int, int, tuple]] = {len(layers): (0, 0, ())}
    for first in reversed(range(len(layers))):
        candidates = []
        for period in range(1, len(layers) - first + 1):
            pattern, repeats, stop = layers[first : first + period], 0, first
            alternates = len({stack for stack, _ in pattern}) > 1
            while layers[stop : stop + period] == pattern:
                repeats, stop = repeats + 1, stop + period
                if repeats > 1 or not alternates:
                    compiled, count, rest = best[stop]
                    candidates.append((compiled + period, count + 1, ((first, period, repeats), *rest)))
        best[first] = min(candidates, key=lambda candidate: (*candidate[:2], -math.prod(candidate[2][0][1:])))
    return best[0][2]


_MAX_UNROLLED = 32


def runs_as_scan(
    scan: bool | str, num_layers: int, remat_policy: RematPolicy, *, platform: str, num_devices: int
) -> tuple[bool, str]:
    """Tells whether to run the layers as a scan instead of unrolled, and why.

    A scan compiles in constant time and needs the least memory. Unrolled on one GPU, XLA overlaps and fuses across
    layers, at the cost of compiling each layer. It also copies what a layer has offloaded back to the device long before the
    layer's backward pass, so that it saves no memory.
    """
    if scan != "auto":
        return bool(scan), f"model.scan_layers: {str(scan).lower()}"
    if offloads(remat_policy):
        return True, "outside a loop, offloaded activations would return to the device at once"
    if platform == "gpu" and num_devices == 1 and num_layers <= _MAX_UNROLLED:
        return False, f"one GPU, {num_layers} layers"
    return True, "compiles once for all layers"


def scan_layers(
    body: Callable[..., tuple[Carry, Any]], carry: Carry, per_layer: tuple, Layers: Axis, *, unroll: bool
) -> tuple[Carry, Any]:
    """Runs `carry, out = body(0, carry, *slices)` for one layer after the other: `scan_pattern` with one group."""
    carry, (out,) = scan_pattern(body, carry, (per_layer,), (Layers,), (0,), unroll=unroll)
    return carry, out


def scan_pattern(
    body: Callable[..., tuple[Carry, Any]],
    carry: Carry,
    per_layer: Sequence[tuple],
    Layers: Sequence[Axis],
    group_of_layer: Sequence[int],
    *,
    unroll: bool,
) -> tuple[Carry, list[Any]]:
    """Runs `carry, out = body(place, carry, *slices)` for one layer after the other, of groups that alternate.

    Args:
        per_layer: pytrees of each group. Named arrays with the group's axis and plain arrays (along their first axis) are
            sliced; everything else is passed to each layer unchanged.
        Layers: the axis that stacks each group's layers: as many as a whole number of periods has of it.
        group_of_layer: the group of each layer in a period, which the loop's body runs. `place` is a layer's index within it.
        unroll: compile every layer separately instead of a loop.

    Returns:
        The last carry, and for each group the named arrays of every `out`, stacked along its axis.
    """
    groups = [
        _Group(*jax.tree.flatten(tree, is_leaf=is_named), axis) for tree, axis in zip(per_layer, Layers, strict=True)
    ]
    counts = [group_of_layer.count(number) for number in range(len(groups))]
    num_periods = Layers[0].size // counts[0]
    assert [axis.size for axis in Layers] == [count * num_periods for count in counts], "a period is whole"

    def one_period(carry: Carry, arrays: list) -> tuple[Carry, list]:
        outs: list[list] = [[] for _ in groups]
        for place, number in enumerate(group_of_layer):
            group, index = groups[number], len(outs[number])
            layer_arrays = (
                arrays[number] if counts[number] == 1 else jax.tree.map(lambda x, i=index: x[i], arrays[number])
            )
            carry, out = body(place, carry, *group.slices(layer_arrays))
            outs[number].append(group.arrays_of(out))
        return carry, [parts[0] if len(parts) == 1 else _stacked(parts) for parts in outs]

    xs = [
        group.arrays()
        if count == 1
        else jax.tree.map(lambda x, n=count: x.reshape(-1, n, *x.shape[1:]), group.arrays())
        for group, count in zip(groups, counts, strict=True)
    ]
    carry, arrays = jax.lax.scan(one_period, carry, xs, length=num_periods, unroll=unroll or 1)
    return carry, [
        group.named(group_arrays if count == 1 else [x.reshape(-1, *x.shape[2:]) for x in group_arrays])
        for group, count, group_arrays in zip(groups, counts, arrays, strict=True)
    ]


def _stacked(parts: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    return [jnp.stack(layers) for layers in zip(*parts, strict=True)]


@dataclass
class _Group:
    """The pytrees of layers with the same structure, as plain arrays with the layers first.

    Attributes:
        leaves, structure: of the pytrees.
        Layers: the axis that stacks the layers.
        outputs: axes and structure of what a layer returns, once one has run.
    """

    leaves: list
    structure: Any
    Layers: Axis
    outputs: Any = None

    def arrays(self) -> list[jax.Array | None]:
        """The arrays of all layers; None for a leaf that is passed to each layer unchanged."""
        return [_layers_first(leaf, self.Layers) for leaf in self.leaves]

    def slices(self, arrays: Sequence[Any]) -> Any:
        """One layer's pytrees, from its arrays."""
        slices = [
            leaf if array is None else _slice(leaf, array, self.Layers)
            for leaf, array in zip(self.leaves, arrays, strict=True)
        ]
        return jax.tree.unflatten(self.structure, slices)

    def arrays_of(self, out: Any) -> list[jax.Array]:
        """The arrays of what a layer returned."""
        named, structure = jax.tree.flatten(out, is_leaf=is_named)
        self.outputs = [leaf.axes for leaf in named], structure
        return [leaf.array for leaf in named]

    def named(self, arrays: Sequence[jax.Array]) -> Any:
        """Stacks what all layers returned."""
        axes, structure = self.outputs
        named = [NamedArray(array, (self.Layers, *array_axes)) for array, array_axes in zip(arrays, axes, strict=True)]
        return jax.tree.unflatten(structure, named)


def _layers_first(leaf: Any, Layers: Axis) -> jax.Array | None:
    if is_named(leaf):
        return leaf.rearrange((Layers, ...)).array if leaf.has_axis(Layers) else None
    return leaf if eqx.is_array(leaf) else None


def _slice(whole: Any, array: jax.Array, Layers: Axis) -> Any:
    if not is_named(whole):
        return array
    return NamedArray(array, tuple(axis for axis in whole.axes if axis.name != Layers.name))
