"""The body of a decoder: layers of the same structure, in one stack or in several that run one after the other.

A stack has an axis `layers` of its own. One stack is the usual case; the paths of its parameters contain no number.
"""

import abc
import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray

from jaxlm.core.axes import LAYERS
from jaxlm.core.sharding import current_layout, current_platform, for_compute
from jaxlm.core.tree import is_named, modules
from jaxlm.models.attention.api import AttentionMask
from jaxlm.models.attention.choose import AUTO
from jaxlm.models.base import EMBEDDING, FINAL, AuxLoss, Hidden, Inputs, KVCache, check_taps, layer_tap, tap_names
from jaxlm.models.inference.kv_cache import extend_cache, mask_over_cache
from jaxlm.models.layers import ForCache, LayerCache, LayerContext, with_dropout_keys
from jaxlm.models.norms import Norm
from jaxlm.models.remat import RematPolicy, remat, with_remat_modules
from jaxlm.models.rope import Places, RotaryConfig
from jaxlm.models.scan import runs_as_scan, scan_layers

T = TypeVar("T")


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
        interleaved: rotate neighboring features, instead of pairs from the two halves of the rotated features.
    """

    rope: RotaryConfig | None = None
    window: int | None = None
    interleaved: bool = False


def shortest_period(kinds: Sequence[T]) -> tuple[T, ...]:
    """The shortest prefix of `kinds` that repeats to give all of them. The last repetition may be partial."""
    return next(
        tuple(kinds[:period])
        for period in range(1, len(kinds) + 1)
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds))
    )


def switch_lengths(kinds: Sequence[LayerKind]) -> tuple[int, ...]:
    """The lengths beyond which layers of these kinds rotate a text in another way, in ascending order."""
    lengths = {kind.rope.switch_length() for kind in kinds if kind.rope is not None}
    return tuple(sorted(length for length in lengths if length is not None))


def grouped_kinds(kind: LayerKind, last: LayerKind, every: int, num_layers: int) -> tuple[LayerKind, ...]:
    """The kinds of layers that are grouped by `every`: `last` for the last layer of each group, else `kind`."""
    return tuple(kind if (i + 1) % every else last for i in range(num_layers))


def layer_contexts(
    kinds: Sequence[LayerKind],
    inputs: Inputs,
    attention_mask: AttentionMask,
    backend: str,
    HeadSize: Axis,
) -> list[LayerContext]:
    """The context that the layers of each kind share in one forward pass."""
    places = Places(inputs.positions, inputs.segment_ids)
    rotations = {
        (rope, interleaved): None if rope is None else rope.rotation(places, HeadSize.size, interleaved=interleaved)
        for rope, interleaved in dict.fromkeys((kind.rope, kind.interleaved) for kind in kinds)
    }
    return [
        LayerContext(attention_mask, rotations[kind.rope, kind.interleaved], kind.window, backend) for kind in kinds
    ]


class Body(abc.ABC):
    """The layers of a decoder: one stack, or several that run one after the other, then a norm."""

    @property
    @abc.abstractmethod
    def stacks(self) -> tuple["Stack", ...]:
        """The stacks, from first to last. The last one has the final norm."""

    @property
    def first_layers(self) -> tuple[int, ...]:
        """The number of each stack's first layer, counted from 0 over all stacks."""
        return tuple(itertools.accumulate((stack.Layers.size for stack in self.stacks[:-1]), initial=0))

    @property
    def num_layers(self) -> int:
        """Number of layers of all stacks."""
        return self.first_layers[-1] + self.stacks[-1].Layers.size

    @property
    def kinds_by_layer(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, from first to last."""
        return tuple(kind for stack in self.stacks for kind in stack.kinds_between(0, stack.Layers.size))

    def split_at(self, layer: int) -> "Stacks":
        """The same layers, with a stack that ends before `layer` (counted from 0 over all stacks)."""
        parts: list[Stack] = []
        for first, stack in zip(self.first_layers, self.stacks, strict=True):
            cut, size = layer - first, stack.Layers.size
            parts += [stack.between(0, cut), stack.between(cut, size)] if 0 < cut < size else [stack]
        return Stacks(tuple(parts))

    def joined_at(self, layer: int) -> "Body":
        """The inverse of `split_at`: joins the stack that begins with `layer` to the one before it."""
        at = self.first_layers.index(layer)
        parts = (*self.stacks[: at - 1], self.stacks[at - 1].followed_by(self.stacks[at]), *self.stacks[at + 1 :])
        return parts[0] if len(parts) == 1 else Stacks(parts)

    def __call__(
        self,
        x: NamedArray,
        inputs: Inputs,
        cache: KVCache | None,
        key: jax.Array | None,
        taps: Sequence[str] = (),
    ) -> Hidden:
        """Maps embedded tokens {batch, position, embed} to final hidden states; `taps` as in `LanguageModel.hidden`."""
        check_taps(taps, tap_names(self.num_layers))
        filled = None if cache is None or cache.fresh else cache
        attention_mask = AttentionMask.of(inputs) if filled is None else mask_over_cache(filled, inputs)
        shared = ForwardPass(inputs, attention_mask, key, self.num_layers, stores=cache is not None)
        residuals, outputs = {EMBEDDING: x}, []
        for number, (first, stack) in enumerate(zip(self.first_layers, self.stacks, strict=True)):
            cached = None if filled is None else LayerCache(filled.keys[number], filled.values[number])
            stop_layers = [at + 1 for at in range(stack.Layers.size - 1) if layer_tap(first + at) in taps]
            segments = []
            for start, stop in itertools.pairwise((0, *stop_layers, stack.Layers.size)):
                x, out = stack.run(x, shared, cached, start, stop, first_layer=first)
                residuals[layer_tap(first + stop - 1)] = x
                segments.append(out)
            outputs.append(_concatenated(segments))
        final_norm = self.stacks[-1].final_norm
        assert final_norm is not None
        final = for_compute(final_norm)(x)
        new, aux = zip(*outputs, strict=True)
        extended = None
        if cache is not None:
            extended = extend_cache(cache, inputs, tuple(kv.keys for kv in new), tuple(kv.values for kv in new))
        aux = _concatenated(aux)
        tapped = {name: (residuals | {FINAL: final})[name] for name in taps}
        return Hidden(final, extended, {} if aux is None else aux.aux_losses(), tapped)


def _concatenated(parts: Sequence[T]) -> T:
    """Parameters or outputs of consecutive layers in one tree."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: hax.concatenate(LAYERS, leaves), *parts, is_leaf=is_named)


class HeterogeneousBody(eqx.Module):
    """Layers of different structures, which no `Body` can stack.

    Attributes:
        kinds: the kind of each layer.
    """

    kinds: eqx.AbstractVar[tuple[LayerKind, ...]]

    @property
    @abc.abstractmethod
    def Layers(self) -> Axis:
        """An axis with the number of layers."""

    @abc.abstractmethod
    def unstacked(self) -> Any:
        """A copy with separate arrays per layer, for decoding with an `UnstackedCache`."""


@dataclass(frozen=True)
class ForwardPass:
    """What all stacks share in one forward pass.

    Attributes:
        key: for dropout; None means no dropout.
        num_layers: number of layers of all stacks.
        stores: whether there is a cache to write, so that layers return their keys and values.
    """

    inputs: Inputs
    attention_mask: AttentionMask
    key: jax.Array | None
    num_layers: int
    stores: bool


class Stack(Body, eqx.Module):
    """Layers of the same structure, with an axis `layers` of their own.

    Attributes:
        layers: the blocks; every parameter has the leading axis `layers`.
        final_norm: the norm before the head; None unless this is the last stack.
        kinds: the kinds of the layers, repeated as often as needed.
        HeadSize: features per head.
        scan: run the layers as a scan (true), unrolled (false), or `auto`.
        remat_policy: what each layer saves for the backward pass.
        attn_backend: backend of attention, or `auto`.
    """

    layers: hnn.Stacked
    final_norm: Norm | None
    kinds: tuple[LayerKind, ...] = eqx.field(static=True)
    HeadSize: Axis = eqx.field(static=True)
    scan: bool | Literal["auto"] = eqx.field(static=True)
    remat_policy: RematPolicy = eqx.field(static=True)
    attn_backend: str = eqx.field(static=True)

    @property
    def stacks(self) -> tuple["Stack", ...]:
        return (self,)

    @property
    def Layers(self) -> Axis:
        """The axis that stacks the parameters of the blocks."""
        return self.layers.Block

    def kinds_between(self, start: int, stop: int) -> list[LayerKind]:
        """The kinds of layers `start` to `stop`."""
        return [self.kinds[at % len(self.kinds)] for at in range(start, stop)]

    def between(self, start: int, stop: int) -> "Stack":
        """Layers `start` to `stop` as a stack of their own. It has the final norm only if it has the last layer."""
        if (start, stop) == (0, self.Layers.size):
            return self
        stacked = _layers_between(self.layers.stacked, start, stop)
        return dataclasses.replace(
            self,
            layers=dataclasses.replace(self.layers, stacked=stacked, Block=self.Layers.resize(stop - start)),
            final_norm=self.final_norm if stop == self.Layers.size else None,
            kinds=shortest_period(self.kinds_between(start, stop)),
        )

    def followed_by(self, upper: "Stack") -> "Stack":
        """The layers of both stacks, which must have the same structure, in one stack."""
        sizes = self.Layers.size, upper.Layers.size
        stacked = _concatenated([self.layers.stacked, upper.layers.stacked])
        kinds = [*self.kinds_between(0, sizes[0]), *upper.kinds_between(0, sizes[1])]
        layers = dataclasses.replace(self.layers, stacked=stacked, Block=self.Layers.resize(sum(sizes)))
        return dataclasses.replace(upper, layers=layers, kinds=shortest_period(kinds))

    def run(
        self, x: NamedArray, shared: ForwardPass, cached: LayerCache | None, start: int, stop: int, *, first_layer: int
    ) -> tuple[NamedArray, Any]:
        """Runs layers `start` to `stop` on {batch, position, embed}.

        Args:
            cached: the filled cache of this stack's layers; None if there is none.
            first_layer: number of layers in the stacks before this one.

        Returns:
            The residual stream after the last of these layers, and (keys and values, auxiliary outputs) of all of them.
        """
        if (start, stop) != (0, self.Layers.size):
            part, cached = self.between(start, stop), _layers_between(cached, start, stop)
            return part.run(x, shared, cached, 0, stop - start, first_layer=first_layer + start)
        # Prompts have any length, which the configured backend may not allow.
        backend = AUTO if shared.stores else self.attn_backend
        contexts = layer_contexts(self.kinds, shared.inputs, shared.attention_mask, backend, self.HeadSize)
        layout = current_layout()
        num_devices = 1 if layout is None else layout.mesh.size
        scan, _ = runs_as_scan(self.scan, self.Layers.size, platform=current_platform(), num_devices=num_devices)

        def layer(kind_index: int, x: NamedArray, block: Block, index: NamedArray, layer_cache: LayerCache | None, key):
            block = with_remat_modules(self.remat_policy, with_dropout_keys(block, key), scan=scan)
            x, new, aux = block(x, contexts[kind_index], layer_cache, index=index, key=key)
            return hax.auto_sharded(x), (new if shared.stores else None, aux)

        per_layer = (
            self.layers.stacked,
            hax.arange(self.Layers, start=first_layer),
            cached,
            None if shared.key is None else _layer_keys(shared.key, shared.num_layers, first_layer, self.Layers.size),
        )
        layer = remat(self.remat_policy, layer, scan=scan)
        period = len(self.kinds)
        return scan_layers(layer, hax.auto_sharded(x), per_layer, self.Layers, unroll=not scan, period=period)


def _layers_between(tree: T, start: int, stop: int) -> T:
    """Layers `start` to `stop` of every array."""
    return jax.tree.map(lambda leaf: leaf[LAYERS, start:stop], tree, is_leaf=is_named)


def _layer_keys(key: jax.Array, num_layers: int, first: int, count: int) -> jax.Array:
    """One key per layer. They do not depend on how the layers are divided into stacks."""
    keys = jax.random.split(key, num_layers)
    return keys if count == num_layers else keys[first : first + count]


_NUMBER = re.compile(r"^body\.(\d+)\.")


def path_in_one_stack(path: str, model: Any) -> tuple[str, int]:
    """The path of a layer as if the model had one stack, and the number of the first layer that it stands for."""
    numbered = _NUMBER.match(path)
    if numbered is None:
        return path, 0
    (body,) = modules(model, Body)
    return f"body.{path[numbered.end() :]}", body.first_layers[int(numbered[1])]


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Stacks(Body):
    """Several stacks. Their numbers are part of the paths of parameters: `body.0.layers...`, `body.1.layers...`."""

    parts: tuple[Stack, ...]

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return self.parts

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Stack]], None]:
        return [(jax.tree_util.SequenceKey(number), stack) for number, stack in enumerate(self.parts)], None

    @classmethod
    def tree_unflatten(cls, _: None, stacks: Sequence[Stack]) -> "Stacks":
        return cls(tuple(stacks))
