"""A stack of equal layers with one parameter layout, run as one loop or unrolled.

`haliax.scan` names each layer's slice of the parameters before the layer sees it. What the backward pass needs of a
layer is then the named copy and not the slice itself, and the loop stores all of them: every parameter once more, and
gathered from all devices under FSDP. Here the slices are passed on as they are, and the backward pass reads them again
from the stacked parameters.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.sharding import current_layout, current_platform, for_compute
from jaxlm.models.attention.api import AttentionMask
from jaxlm.models.attention.choose import AUTO
from jaxlm.models.base import AuxLoss, Hidden, Inputs, KVCache
from jaxlm.models.inference.kv_cache import extended, mask_with
from jaxlm.models.layers import ForCache, LayerCache, LayerContext, with_dropout_keys
from jaxlm.models.norms import LayerNorm, RMSNorm
from jaxlm.models.remat import RematPolicy, remat
from jaxlm.models.rope import RotaryConfig

Carry = TypeVar("Carry")


_UNROLLED_AT_MOST = 32


def runs_as_scan(scan: bool | str, num_layers: int, *, platform: str, num_devices: int) -> tuple[bool, str]:
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


class LayerAux(Protocol):
    """What a layer found on its way, as named arrays."""

    def aux_losses(self) -> dict[str, AuxLoss]:
        """Of all layers, whose arrays are stacked."""
        ...


class Block(Protocol):
    """One layer of a family."""

    def __call__(
        self, x: NamedArray, context: LayerContext, past: LayerCache | None, *, index: NamedArray, key: jax.Array | None
    ) -> tuple[NamedArray, ForCache, LayerAux | None]:
        """{batch, position, embed} to the same, what the cache is to have of these positions, and what it found."""
        ...


@dataclass(frozen=True)
class LayerKind:
    """How a layer differs from others of the same shape.

    Attributes:
        rope: the rotation of queries and keys, if any.
        window: how many tokens a token sees, itself included; None means all before it.
    """

    rope: RotaryConfig | None = None
    window: int | None = None


def shortest_period(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The beginning of `kinds` that they repeat, the last time perhaps in part."""
    return next(
        tuple(kinds[:period])
        for period in range(1, len(kinds) + 1)
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds))
    )


def layer_contexts(
    kinds: Sequence[LayerKind],
    inputs: Inputs,
    attention_mask: AttentionMask,
    backend: str,
    HeadSize: Axis,
    seq_len: int,
) -> list[LayerContext]:
    """What the layers of each kind share in one forward pass."""
    rotations = {
        rope: None if rope is None else rope.rotation(inputs.positions, HeadSize.size, seq_len)
        for rope in dict.fromkeys(kind.rope for kind in kinds)
    }
    return [LayerContext(attention_mask, rotations[kind.rope], kind.window, backend) for kind in kinds]


class Transformer(eqx.Module):
    """The body of a decoder: layers, then a norm.

    Attributes:
        layers: the blocks, every parameter with the leading axis `layers`.
        final_norm: what the head reads through.
        kinds: what each layer is; they repeat after the last.
        HeadSize: features of a head, which are rotated.
        seq_len: the length that the model is for.
        scan: one compiled layer in a loop, or each layer on its own.
        keep: what each layer keeps for the backward pass.
        attn_backend: what attention runs on.
    """

    layers: hnn.Stacked
    final_norm: LayerNorm | RMSNorm
    kinds: tuple[LayerKind, ...] = eqx.field(static=True)
    HeadSize: Axis = eqx.field(static=True)
    seq_len: int = eqx.field(static=True)
    scan: bool | Literal["auto"] = eqx.field(static=True)
    remat_policy: RematPolicy = eqx.field(static=True)
    attn_backend: str = eqx.field(static=True)

    def __call__(self, x: NamedArray, inputs: Inputs, cache: KVCache | None, key: jax.Array | None) -> Hidden:
        """Embedded tokens {batch, position, embed} to normed ones, through all layers."""
        Layers = self.layers.Block
        past = None if cache is None or cache.fresh else cache
        attention_mask = AttentionMask.of(inputs) if past is None else mask_with(past, inputs)
        backend = self.attn_backend if cache is None else AUTO  # a prompt has any length
        contexts = layer_contexts(self.kinds, inputs, attention_mask, backend, self.HeadSize, self.seq_len)

        def layer(place: int, x: NamedArray, block: Block, index: NamedArray, past: LayerCache | None, key):
            x, new, seen = with_dropout_keys(for_compute(block), key)(x, contexts[place], past, index=index, key=key)
            return hax.auto_sharded(x), (None if cache is None else new, seen)

        per_layer = (
            self.layers.stacked,
            hax.arange(Layers),
            None if past is None else LayerCache(past.keys, past.values),
            None if key is None else jax.random.split(key, Layers.size),
        )
        layout = current_layout()
        num_devices = 1 if layout is None else layout.mesh.size
        scan, _ = runs_as_scan(self.scan, Layers.size, platform=current_platform(), num_devices=num_devices)
        layer = remat(self.remat_policy, layer, scan=scan)
        x, out = scan_layers(layer, hax.auto_sharded(x), per_layer, Layers, unroll=not scan, period=len(self.kinds))
        new, seen = out
        final = for_compute(self.final_norm)(x)
        longer = None if cache is None else extended(cache, inputs, new.keys, new.values)
        return Hidden(final, longer, {} if seen is None else seen.aux_losses())
