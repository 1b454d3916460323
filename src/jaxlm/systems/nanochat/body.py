"""The layers of nanochat's model in one scan, although they differ.

Every layer has matrices of the same shapes, and two factors; these are stacked along `layers`. Every other layer has a value
embedding too; these are stacked along `value_layers`, so that no other layer stores one. The scan's body is one period of
layers, after which windows and value embeddings repeat (four layers for the pattern SSSL), so that the windows are static
and attention skips what they mask. Layers after the last whole period, fewer than two periods, are compiled separately.

A lookup layer ends a scan, and another follows: inside one, the gradient of its table would be added up per layer.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import KEY_POSITION, LAYERS, STACKED_LAYERS, VALUE_LAYERS
from jaxlm.core.parameters import SCALE, TABLE, DeclaresParameters, Parameter
from jaxlm.core.products.float32_sums import scaled
from jaxlm.core.sharding import current_layout, current_platform, for_compute
from jaxlm.core.tree import is_named
from jaxlm.models.attention.api import AttentionMask
from jaxlm.models.attention.choose import AUTO
from jaxlm.models.base import EMBEDDING, Inputs, check_taps, layer_tap, tap_names
from jaxlm.models.inference.cache import DecodingCache, UnstackedCache, extend_cache, extend_slots, mask_over_cache
from jaxlm.models.layers import with_dropout_keys
from jaxlm.models.linear import Linear, MatrixLinear
from jaxlm.models.mixers.base import ForCache, LayerCache, LayerContext
from jaxlm.models.remat import RematPolicy, layer_input, remat
from jaxlm.models.scan import runs_as_scan, scan_layers, shortest_period
from jaxlm.models.stacks import HeterogeneousBody, LayerKind, concatenated, layer_contexts
from jaxlm.systems.nanochat.layers import NanoBlock, ValueEmbedding, reversed_rotation
from jaxlm.systems.nanochat.lookup import LookupLayer

_PERIODS, _LOOKUP = "periods", 1
_Kind = tuple[LayerKind, bool]
"""What is static about a layer, and whether it has a value embedding."""


class BodyOutput(eqx.Module):
    """Holds what the layers return.

    Attributes:
        last: the residual stream after the last layer.
        middle: the residual stream after layer L // 2; None if it is not needed.
        cache: the given cache, extended.
        taps: the residual stream at the requested taps.
    """

    last: NamedArray
    middle: NamedArray | None
    cache: Any
    taps: dict[str, NamedArray]


class _Layer(eqx.Module):
    """Holds what one layer has; or, with a leading axis, what several have."""

    block: NanoBlock
    resid_lambda: NamedArray
    x0_lambda: NamedArray
    index: NamedArray
    layer_cache: LayerCache | None
    key: jax.Array | None


class _Carry(eqx.Module):
    """The residual stream, and what it was after the middle layer (None if that is not needed)."""

    x: NamedArray
    middle: NamedArray | None


@dataclass(frozen=True)
class _ForwardPass:
    """Holds what all layers share in one forward pass.

    Attributes:
        x0: the input of the first layer.
        contexts: by kind of layer.
        middle: number of the middle layer.
        stores: whether layers return keys and values.
    """

    x0: NamedArray
    tokens: NamedArray
    contexts: dict[LayerKind, LayerContext]
    middle: int
    stores: bool

    def run(
        self, kind: LayerKind, carry: _Carry, layer: _Layer, value: ValueEmbedding | None
    ) -> tuple[_Carry, ForCache]:
        """Runs one layer."""
        axes, dtype = carry.x.axes, carry.x.dtype
        block, value = with_dropout_keys((for_compute(layer.block), value), layer.key)
        resid, x0_factor = for_compute((layer.resid_lambda, layer.x0_lambda))
        x = (scaled(carry.x, resid) + scaled(self.x0, x0_factor)).rearrange(axes).astype(dtype)
        x, new = block(x, self.contexts[kind], layer.layer_cache, value, self.tokens)
        x = hax.auto_sharded(x.rearrange(axes))
        if (middle := carry.middle) is not None:
            # A scalar condition makes `hax.where` a `cond`, whose result GPUs gather from all devices.
            middle = NamedArray(
                jnp.where(layer.index.array == self.middle, x.array, middle.rearrange(axes).array), axes
            )
        return _Carry(x, middle), new

    def look_up(self, number: int, carry: _Carry, lookup: LookupLayer, key: jax.Array | None) -> _Carry:
        """Runs the lookup layer after layer `number`."""
        lookup = with_dropout_keys(lookup, key)
        x = carry.x + lookup(carry.x, self.tokens)
        return _Carry(x, x if number == self.middle and carry.middle is not None else carry.middle)


class NanoBody(HeterogeneousBody, DeclaresParameters):
    """The layers, stacked.

    Attributes:
        layers: the blocks; every parameter has the leading axis `layers`.
        resid_lambdas, x0_lambdas: {layers}, factors of the residual stream and of the body's input before each layer.
        value_embedding: {value_layers, vocab, value_embed}.
        value_gates: {value_layers, kv_heads, gate_channels}.
        lookups: the lookup layers.
        lookup_numbers: the number of the layer that each of them follows, ascending.
        kinds: the kind of each layer.
        HeadSize: features per head.
        seq_len: the model's maximum sequence length.
        rope_dtype: dtype that the cosines and sines of the rotary embedding are rounded to.
        gate_scale: largest value of the gate of a value embedding.
        keeps_middle: return the residual stream after layer L // 2.
        scan: run the layers as a scan (true), unrolled (false), or `auto`.
        remat_policy: what each layer saves for the backward pass.
        attn_backend: backend of attention, or `auto`.
    """

    layers: hnn.Stacked
    resid_lambdas: NamedArray
    x0_lambdas: NamedArray
    value_embedding: NamedArray
    value_gates: Linear
    lookups: tuple[LookupLayer, ...]
    lookup_numbers: tuple[int, ...] = eqx.field(static=True)
    kinds: tuple[LayerKind, ...] = eqx.field(static=True)
    HeadSize: Axis = eqx.field(static=True)
    seq_len: int = eqx.field(static=True)
    rope_dtype: str = eqx.field(static=True)
    gate_scale: float = eqx.field(static=True)
    keeps_middle: bool = eqx.field(static=True)
    scan: bool | Literal["auto"] = eqx.field(static=True)
    remat_policy: RematPolicy = eqx.field(static=True)
    attn_backend: str = eqx.field(static=True)

    @property
    def Layers(self) -> Axis:
        return self.layers.Block

    def parameters(self) -> dict[str, Parameter]:
        return {"resid_lambdas": SCALE, "x0_lambdas": SCALE, "value_embedding": TABLE}

    def unstacked(self) -> "UnstackedNanoBody":
        layers, all_values = self._layers(None, None, 0, self.Layers.size), self._values()
        layers = tuple(_at(layers, LAYERS, number) for number in range(self.Layers.size))
        numbers = itertools.count()
        values = tuple(
            _at(all_values, VALUE_LAYERS, next(numbers)) if self._has_value(number) else None
            for number in range(self.Layers.size)
        )
        layers, values, lookups = jax.tree.map(
            lambda part: MatrixLinear.of(part) if isinstance(part, Linear) else part,
            (layers, values, self.lookups),
            is_leaf=lambda part: isinstance(part, Linear),
        )
        options = self.kinds, self.seq_len, self.rope_dtype, self.keeps_middle
        return UnstackedNanoBody(layers, values, lookups, self.lookup_numbers, *options)

    def __call__(
        self,
        x: NamedArray,
        inputs: Inputs,
        cache: DecodingCache | None,
        key: jax.Array | None,
        taps: Sequence[str] = (),
    ) -> BodyOutput:
        """Maps embedded tokens {batch, position, embed} to the residual stream after the last layer.

        Args:
            taps: as of `LanguageModel.hidden`, without `final`.
        """
        num_layers = self.Layers.size
        check_taps(taps, tap_names(num_layers))
        filled = None if cache is None or cache.fresh else cache
        mask = AttentionMask.of(inputs) if filled is None else mask_over_cache(filled, inputs)
        # Prompts have any length, which the configured backend may not allow.
        backend = AUTO if cache is not None else self.attn_backend
        contexts = _contexts(self, inputs, mask, backend)
        shared = _ForwardPass(x, inputs.tokens, contexts, num_layers // 2, stores=cache is not None)
        carry = _Carry(hax.auto_sharded(x), x if self.keeps_middle else None)
        cached = None if filled is None else filled.stacks[0]
        keys = None if key is None else jax.random.split(key, num_layers)
        residuals, outputs = {EMBEDDING: x}, []
        lookups = dict(zip(self.lookup_numbers, self.lookups, strict=True))
        ends = [number for number in range(num_layers - 1) if layer_tap(number) in taps or number in lookups]
        for start, stop in itertools.pairwise((0, *(number + 1 for number in ends), num_layers)):
            carry, out = self._run(shared, carry, cached, keys, start, stop)
            if (last := stop - 1) in lookups:
                look_up = remat(self.remat_policy, functools.partial(shared.look_up, last), scan=False)
                carry = look_up(carry, lookups[last], None if keys is None else jax.random.fold_in(keys[last], _LOOKUP))
            residuals[layer_tap(last)] = carry.x
            outputs.append(out)
        if cache is not None:
            cache = extend_cache(cache, inputs, (concatenated(outputs),))
        tapped = {name: residuals[name] for name in taps if name in residuals}
        return BodyOutput(carry.x, carry.middle, cache, tapped)

    def _run(
        self, shared: _ForwardPass, carry: _Carry, cached: Any, keys: jax.Array | None, start: int, stop: int
    ) -> tuple[_Carry, Any]:
        """Runs layers `start` to `stop`. Returns their keys and values too, {layers, ...}, if `shared` stores them."""
        layout = current_layout()
        num_devices = 1 if layout is None else layout.mesh.size
        where = {"platform": current_platform(), "num_devices": num_devices}
        scan, _ = runs_as_scan(self.scan, self.Layers.size, self.remat_policy, **where)
        kinds = [(self.kinds[number], self._has_value(number)) for number in range(start, stop)]
        period, num_periods = _periods(kinds)
        last = start + period * num_periods
        outputs = []
        if num_periods:
            Periods = Axis(_PERIODS, num_periods)
            stacked = self._stacked(cached, keys, start, last)
            grouped = tuple(_grouped(part, name, Periods) for part, name in zip(stacked, STACKED_LAYERS, strict=True))
            step = self._several_layers(shared, kinds[:period], scan=scan)
            carry, out = scan_layers(step, carry, grouped, Periods, unroll=not scan)
            outputs.append(
                jax.tree.map(lambda leaf: leaf.flatten_axes((_PERIODS, LAYERS), LAYERS), out, is_leaf=is_named)
            )
        if last < stop:
            step = self._several_layers(shared, kinds[last - start :], scan=False)
            carry, out = step(0, carry, *self._stacked(cached, keys, last, stop))
            outputs.append(out)
        return carry, concatenated(outputs)

    def _several_layers(self, shared: _ForwardPass, kinds: Sequence[_Kind], *, scan: bool) -> Callable[..., Any]:
        """Layers of these kinds as a function of the carry, and of the stacked layers and value embeddings.

        Each layer gets all of them and selects its own, so that the backward pass selects them again. What it selects would
        otherwise be saved: a copy of the parameters.
        """

        def layer(kind: LayerKind, number: int, value_number: int | None, carry: _Carry, layers: _Layer, values: Any):
            value = None if value_number is None else _at(values, VALUE_LAYERS, value_number)
            carry = dataclasses.replace(carry, x=layer_input(carry.x))
            carry, new = shared.run(kind, carry, _at(layers, LAYERS, number), value)
            return carry, new if shared.stores else None

        def several(_: int, carry: _Carry, layers: _Layer, values: ValueEmbedding | None) -> tuple[_Carry, Any]:
            outputs, num_values = [], 0
            for number, (kind, has_value) in enumerate(kinds):
                chosen = functools.partial(layer, kind, number, num_values if has_value else None)
                carry, out = remat(self.remat_policy, chosen, scan=scan)(carry, layers, values if has_value else None)
                outputs.append(jax.tree.map(lambda leaf: leaf.broadcast_axis(Axis(LAYERS, 1)), out, is_leaf=is_named))
                num_values += has_value
            return carry, concatenated(outputs)

        return several

    def _stacked(
        self, cached: LayerCache | None, keys: jax.Array | None, start: int, stop: int
    ) -> tuple[_Layer, ValueEmbedding | None]:
        """Layers `start` to `stop`, and their value embeddings (None if no layer has one)."""
        first, last = (sum(self._has_value(earlier) for earlier in range(number)) for number in (start, stop))
        values = None if first == last else _between(self._values(), VALUE_LAYERS, first, last)
        return self._layers(cached, keys, start, stop), values

    def _layers(self, cached: LayerCache | None, keys: jax.Array | None, start: int, stop: int) -> _Layer:
        index = hax.arange(self.Layers)
        layers = _Layer(self.layers.stacked, self.resid_lambdas, self.x0_lambdas, index, cached, keys)
        return _between(layers, LAYERS, start, stop)

    def _values(self) -> ValueEmbedding:
        return ValueEmbedding(self.value_embedding, self.value_gates, self.gate_scale, self.HeadSize)

    def _has_value(self, number: int) -> bool:
        return has_value_embedding(number, self.Layers.size)


class UnstackedNanoBody(eqx.Module):
    """A `NanoBody` with unstacked layers, for decoding with an `UnstackedCache` only."""

    layers: tuple[_Layer, ...]
    values: tuple[ValueEmbedding | None, ...]
    lookups: tuple[LookupLayer, ...]
    lookup_numbers: tuple[int, ...] = eqx.field(static=True)
    kinds: tuple[LayerKind, ...] = eqx.field(static=True)
    seq_len: int = eqx.field(static=True)
    rope_dtype: str = eqx.field(static=True)
    keeps_middle: bool = eqx.field(static=True)

    def __call__(
        self, x: NamedArray, inputs: Inputs, cache: UnstackedCache, key: None, taps: tuple[()] = ()
    ) -> BodyOutput:
        """As `NanoBody`. Each layer updates its cache before it reads it."""
        contexts = _contexts(self, inputs, mask_over_cache(cache, inputs), AUTO, cache.length)
        shared = _ForwardPass(x, inputs.tokens, contexts, len(self.layers) // 2, stores=True)
        carry, layer_caches = _Carry(x, x if self.keeps_middle else None), []
        lookups = dict(zip(self.lookup_numbers, self.lookups, strict=True))
        parts = zip(self.layers, self.values, self.kinds, cache.stacks[0], strict=True)
        for number, (layer, value, kind, cached) in enumerate(parts):
            layer = dataclasses.replace(layer, layer_cache=cached)
            carry, layer_cache = shared.run(kind, carry, layer, value)
            if number in lookups:
                carry = shared.look_up(number, carry, lookups[number], None)
            layer_caches.append(layer_cache)
        extended = UnstackedCache((tuple(layer_caches),), **extend_slots(cache, inputs))
        return BodyOutput(carry.x, carry.middle, extended, {})


def has_value_embedding(number: int, num_layers: int) -> bool:
    """Tells whether a layer has a value embedding: every other one, and the last."""
    return number % 2 == (num_layers - 1) % 2


def _periods(kinds: Sequence[_Kind]) -> tuple[int, int]:
    """The length of a period, and the number of whole periods with which the layers begin.

    The last layer always attends to everything, whatever its letter in the pattern.
    """
    period = len(shortest_period(kinds[:-1] or kinds))
    num_periods = len(kinds) // period
    if num_periods * period == len(kinds) and kinds[-1] != kinds[period - 1]:
        num_periods -= 1
    return period, num_periods


def _contexts(
    body: NanoBody | UnstackedNanoBody,
    inputs: Inputs,
    mask: AttentionMask,
    backend: str,
    start: jax.Array | None = None,
) -> dict[LayerKind, LayerContext]:
    kinds = tuple(dict.fromkeys(body.kinds))
    contexts = layer_contexts(kinds, inputs, mask, backend, start)
    num_keys = mask.key_positions.axis_size(KEY_POSITION)
    return {
        kind: dataclasses.replace(
            context,
            rotation=reversed_rotation(context.rotation, jnp.dtype(body.rope_dtype)),
            window=_window_among(num_keys, kind.window, body.seq_len),
        )
        for kind, context in zip(kinds, contexts, strict=True)
        if context.rotation is not None
    }


def _window_among(num_keys: int, window: int | None, seq_len: int) -> int | None:
    """The window; None if it masks none of the keys. Layers without a window attend at most `seq_len` tokens back."""
    window = seq_len + 1 if window is None else window
    return None if window >= num_keys else window


def _at(stacked: Any, name: str, number: int) -> Any:

    def one(leaf: Any) -> Any:
        if not is_named(leaf):
            return leaf[number]
        names = [axis.name for axis in leaf.axes]
        # A slice, which remat policies recognize, and not the gather that indexing can become.
        array = jax.lax.index_in_dim(leaf.array, number, names.index(name), keepdims=False)
        return NamedArray(array, tuple(axis for axis in leaf.axes if axis.name != name))

    return jax.tree.map(one, stacked, is_leaf=is_named)


def _between(stacked: Any, name: str, start: int, stop: int) -> Any:
    def part(leaf: Any) -> Any:
        size = leaf.axis_size(name) if is_named(leaf) else leaf.shape[0]
        if (start, stop) == (0, size):
            return leaf
        return leaf[name, start:stop] if is_named(leaf) else leaf[start:stop]

    return jax.tree.map(part, stacked, is_leaf=is_named)


def _grouped(stacked: Any, name: str, Periods: Axis) -> Any:
    """Stacked arrays with an axis for the periods before that of the layers."""

    def grouped(leaf: Any) -> Any:
        if not is_named(leaf):
            return leaf.reshape(Periods.size, -1, *leaf.shape[1:])
        axis = leaf.resolve_axis(name)
        return leaf.unflatten_axis(axis, (Periods, axis.resize(axis.size // Periods.size)))

    return jax.tree.map(grouped, stacked, is_leaf=is_named)
