"""A stack of layers of the same structure, run as a scan or unrolled.

`haliax.scan` attaches axis names to each layer's slice of the parameters before the layer runs. The backward pass then
saves the named copy instead of the slice, so the loop stores all parameters a second time, gathered from all devices
under FSDP. This module passes plain slices, and the backward pass reads them again from the stacked parameters.
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
from jaxlm.core.tree import is_named
from jaxlm.models.attention.api import AttentionMask
from jaxlm.models.attention.choose import AUTO
from jaxlm.models.base import AuxLoss, Hidden, Inputs, KVCache
from jaxlm.models.inference.kv_cache import extend_cache, mask_over_cache
from jaxlm.models.layers import ForCache, LayerCache, LayerContext, with_dropout_keys
from jaxlm.models.norms import LayerNorm, RMSNorm
from jaxlm.models.remat import RematPolicy, remat
from jaxlm.models.rope import RotaryConfig

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


class LayerAux(Protocol):
    """Auxiliary outputs of a layer, as named arrays."""

    def aux_losses(self) -> dict[str, AuxLoss]:
        """The auxiliary losses of all layers by metric name. Called with the arrays of all layers stacked."""
        ...


class Block(Protocol):
    """One layer of a family."""

    def __call__(
        self,
        x: NamedArray,
        context: LayerContext,
        layer_cache: LayerCache | None,
        *,
        index: NamedArray,
        key: jax.Array | None,
    ) -> tuple[NamedArray, ForCache, LayerAux | None]:
        """Maps {batch, position, embed} to the same shape; also returns keys and values, and auxiliary outputs.

        Args:
            index: scalar, the number of the layer, from 0.
            key: for dropout; None means no dropout.
        """
        ...


@dataclass(frozen=True)
class LayerKind:
    """Static properties in which layers with the same parameter shapes may differ.

    Attributes:
        rope: rotary position embedding of queries and keys; None for none.
        window: number of tokens that each token attends to, including itself; None means all previous tokens.
    """

    rope: RotaryConfig | None = None
    window: int | None = None


def shortest_period(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The shortest prefix of `kinds` that repeats to give all of them. The last repetition may be partial."""
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
    """The context that the layers of each kind share in one forward pass."""
    rotations = {
        rope: None if rope is None else rope.rotation(inputs.positions, HeadSize.size, seq_len)
        for rope in dict.fromkeys(kind.rope for kind in kinds)
    }
    return [LayerContext(attention_mask, rotations[kind.rope], kind.window, backend) for kind in kinds]


class Transformer(eqx.Module):
    """The body of a decoder: layers, then a norm.

    Attributes:
        layers: the blocks; every parameter has the leading axis `layers`.
        final_norm: the norm before the head.
        kinds: the kinds of the layers, repeated as often as needed.
        HeadSize: features per head.
        seq_len: the model's maximum sequence length.
        scan: run the layers as a scan (true), unrolled (false), or `auto`.
        remat_policy: what each layer saves for the backward pass.
        attn_backend: backend of attention, or `auto`.
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
        """Maps embedded tokens {batch, position, embed} to final hidden states."""
        Layers = self.layers.Block
        filled = None if cache is None or cache.fresh else cache
        attention_mask = AttentionMask.of(inputs) if filled is None else mask_over_cache(filled, inputs)
        backend = self.attn_backend if cache is None else AUTO  # prompt lengths vary, and the backend may not allow all
        contexts = layer_contexts(self.kinds, inputs, attention_mask, backend, self.HeadSize, self.seq_len)

        def layer(kind_index: int, x: NamedArray, block: Block, index: NamedArray, layer_cache: LayerCache | None, key):
            block = with_dropout_keys(for_compute(block), key)
            x, new, aux = block(x, contexts[kind_index], layer_cache, index=index, key=key)
            return hax.auto_sharded(x), (None if cache is None else new, aux)

        per_layer = (
            self.layers.stacked,
            hax.arange(Layers),
            None if filled is None else LayerCache(filled.keys, filled.values),
            None if key is None else jax.random.split(key, Layers.size),
        )
        layout = current_layout()
        num_devices = 1 if layout is None else layout.mesh.size
        scan, _ = runs_as_scan(self.scan, Layers.size, platform=current_platform(), num_devices=num_devices)
        layer = remat(self.remat_policy, layer, scan=scan)
        x, out = scan_layers(layer, hax.auto_sharded(x), per_layer, Layers, unroll=not scan, period=len(self.kinds))
        new, aux = out
        final = for_compute(self.final_norm)(x)
        extended = None if cache is None else extend_cache(cache, inputs, new.keys, new.values)
        return Hidden(final, extended, {} if aux is None else aux.aux_losses())
