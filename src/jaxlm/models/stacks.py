"""The body of a decoder: layers of the same structure in one stack, or layers of several structures in several stacks.

A stack has an axis `layers` of its own. One stack is the usual case; the paths of its parameters contain no number. Stacks
run one after the other, or alternate. Layers that repeat a pattern run as one scan over its repetitions.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Protocol, TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import current_layout, current_platform, for_compute
from jaxlm.core.tree import is_named
from jaxlm.models.attention.api import AttentionMask
from jaxlm.models.attention.choose import AUTO
from jaxlm.models.base import EMBEDDING, FINAL, AuxLoss, Hidden, Inputs, check_taps, layer_tap, tap_names
from jaxlm.models.inference.cache import DecodingCache, extend_cache, mask_over_cache
from jaxlm.models.layers import tiled_mlps, with_dropout_keys
from jaxlm.models.mixers.base import ForCache, LayerCache, LayerContext
from jaxlm.models.mixers.forward_pass import ForwardPass, layers_between
from jaxlm.models.norms import Norm
from jaxlm.models.remat import RematPolicy, for_whole_layers, layer_input, remat, with_remat_modules
from jaxlm.models.rope import Places, QueryScaling, RotaryConfig, Rotation
from jaxlm.models.scan import Segment, runs_as_scan, scan_pattern, segments, shortest_period

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
        rotary_size: the frequencies of the rotary embedding are those of this many features. None in a config, where all
            layers have the same (`TransformerConfig.RotarySize`).
        query_scaling: scores grow with the position of the query; None for constant scores.
        score_factor: of the scores of latent attention, besides that of the head size.
        gives: a name by which later layers read what this one's mixer returns for the cache; None for none.
        takes: the name by which it reads that of an earlier layer, in place of keys and values of its own.
    """

    rope: RotaryConfig | None = None
    window: int | None = None
    interleaved: bool = False
    rotary_size: int | None = None
    query_scaling: QueryScaling | None = None
    score_factor: float = 1.0
    gives: str | None = None
    takes: str | None = None


def switch_lengths(kinds: Sequence[LayerKind]) -> tuple[int, ...]:
    """The lengths beyond which layers of these kinds rotate a text in another way, in ascending order."""
    lengths = {kind.rope.switch_length() for kind in kinds if kind.rope is not None}
    return tuple(sorted(length for length in lengths if length is not None))


def layer_contexts(
    kinds: Sequence[LayerKind],
    inputs: Inputs,
    attention_mask: AttentionMask,
    backend: str,
    start: jax.Array | None = None,
) -> list[LayerContext]:
    """The context that the layers of each kind share in one forward pass.

    Args:
        start: as of a `LayerContext`, for layers that give nothing: what these return is read again.
    """
    places = Places(inputs.positions, inputs.segment_ids, inputs.order)

    @functools.cache
    def rotation(rope: RotaryConfig | None, interleaved: bool, size: int | None) -> Rotation | None:
        if rope is None:
            return None
        assert size is not None, "the kinds of a body say how many features they rotate"
        return rope.rotation(places, size, interleaved=interleaved)

    def context(kind: LayerKind) -> LayerContext:
        turn, scaling = rotation(kind.rope, kind.interleaved, kind.rotary_size), kind.query_scaling
        scale = None if scaling is None else scaling.factors(places)
        start_of = None if kind.gives else start
        order, factor = inputs.order, kind.score_factor
        return LayerContext(attention_mask, turn, kind.window, backend, order, start_of, scale, factor)

    return [context(kind) for kind in kinds]


class LayerFn(Protocol):
    """Defines what a pass over the layers does at each of them (`Body.map_layers`)."""

    def __call__(
        self,
        block: Block,
        x: NamedArray,
        context: LayerContext,
        layer_cache: LayerCache | None,
        *,
        index: NamedArray,
        key: jax.Array | None,
        given: Any,
    ) -> tuple[NamedArray, Any]:
        """Maps {batch, position, embed} to the same shape for the next layer; also returns named arrays to stack.

        Args:
            index, key: as for the block.
            given: the layer's slice of what the pass was given; None if it was given nothing.
        """
        ...


SplitMap = tuple[tuple[int, ...], ...]
"""For each stack before a split, the numbers of the stacks that it has become: one, or a lower and an upper one. Layers that
a model has grown count as split off from the stack beside them."""


class Body(abc.ABC):
    """The layers of a decoder: one stack, or several that run one after the other or alternate, then a norm."""

    @property
    @abc.abstractmethod
    def stacks(self) -> tuple["Stack", ...]:
        """The stacks. Before a split, they are in the order of their first layers. The last one has the final norm."""

    @property
    @abc.abstractmethod
    def stack_of_layer(self) -> tuple[int, ...]:
        """The number of the stack that each layer is in, from the first layer to the last."""

    @property
    @abc.abstractmethod
    def splits(self) -> tuple["SplitMap", ...]:
        """The changes that `split_at` and growth have made, the last one last."""

    @property
    def num_layers(self) -> int:
        """Number of layers of all stacks."""
        return len(self.stack_of_layer)

    @property
    def layer_numbers(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of each stack's layers, counted from 0 over all stacks."""
        return numbers_by_stack(self.stack_of_layer)

    @property
    def kinds_by_layer(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, from first to last."""
        kinds = [iter(stack.kinds_between(0, stack.Layers.size)) for stack in self.stacks]
        return tuple(next(kinds[number]) for number in self.stack_of_layer)

    def split_at(self, layer: int) -> "Stacks":
        """The same layers, with stacks that end before `layer` (counted from 0 over all stacks)."""
        parts: list[list[Stack]] = [[], []]
        places: dict[tuple[int, bool], int] = {}
        for number, (stack, layers) in enumerate(zip(self.stacks, self.layer_numbers, strict=True)):
            cut, size = sum(one < layer for one in layers), stack.Layers.size
            for upper, (start, stop) in enumerate(((0, cut), (cut, size))):
                if start < stop:
                    places[number, bool(upper)] = len(parts[upper])
                    parts[upper].append(stack.between(start, stop))
        places = {(number, upper): place + len(parts[0]) * upper for (number, upper), place in places.items()}
        stack_of_layer = tuple(places[number, at >= layer] for at, number in enumerate(self.stack_of_layer))
        split = tuple(
            tuple(places[number, upper] for upper in (False, True) if (number, upper) in places)
            for number in range(len(self.stacks))
        )
        whole = Stacks.of([*parts[0], *parts[1]], stack_of_layer, self.last_norm)
        return dataclasses.replace(whole, splits=(*self.splits, split))

    def with_layers(self, kept: Sequence[int]) -> "Body":
        """Only some of the layers, in stacks in the order of their first layers. Leaves may be missing (None).

        Args:
            kept: numbers of the layers, counted from 0 over all stacks, in ascending order.

        Raises:
            ConfigError: `split_at` has cut the stacks, which it could not join again.
        """
        if self.splits:
            raise ConfigError(
                "split_at has cut the layers into stacks before, or grow has added a stack. Take layers out before that"
            )
        before = [self.stack_of_layer[layer] for layer in kept]
        numbers = list(dict.fromkeys(before))
        stacks = []
        for number in numbers:
            places = [place for place, layer in enumerate(self.layer_numbers[number]) if layer in kept]
            stacks.append(dataclasses.replace(self.stacks[number].select(places), structure=len(stacks)))
        if len(stacks) == 1:
            return dataclasses.replace(stacks[0], final_norm=self.last_norm)
        return Stacks.of(stacks, tuple(numbers.index(number) for number in before), self.last_norm)

    @property
    def last_norm(self) -> Norm:
        """The norm before the head."""
        norm = self.stacks[-1].final_norm
        assert norm is not None
        return norm

    def __call__(
        self,
        x: NamedArray,
        inputs: Inputs,
        cache: DecodingCache | None,
        key: jax.Array | None,
        taps: Sequence[str] = (),
        first: int = 0,
        stop: int | None = None,
        layer_inputs: NamedArray | None = None,
    ) -> Hidden:
        """Maps embedded tokens {batch, position, embed} to final hidden states; `taps` as in `LanguageModel.hidden`.

        Args:
            first: number of the first layer that runs, on its input instead of embedded tokens. Then no cache is written.
            stop: number of the layer behind the last one that runs; None for all. Then there are no taps.
            layer_inputs: {layers, batch, position, layer_input}, what each layer reads of the tokens; None for nothing.
        """
        check_taps(taps, tap_names(self.num_layers)[first and first + 1 :])
        filled = None if cache is None or cache.fresh else cache
        attention_mask = AttentionMask.of(inputs) if filled is None else mask_over_cache(filled, inputs)
        shared = ForwardPass(inputs, attention_mask, key, filled, cache is not None, layer_inputs)
        residuals = {EMBEDDING: x}
        outputs: list[list[Any]] = [[] for _ in self.stacks]
        every = [layer_tap(layer) for layer in range(self.num_layers)]
        # A pass that stops at every layer would compile each of them.
        keeps_all = self.num_layers > 2 and stop is None and not first and set(every[:-1]) <= set(taps)
        stops = [] if keeps_all else [layer + 1 for layer, tap in enumerate(every[:-1]) if tap in taps]
        bounds = (first, *stops, self.num_layers if stop is None else stop)
        for begin, end in itertools.pairwise(bounds):
            for segment in segments(
                tuple(zip(self.stack_of_layer, self.kinds_by_layer, strict=True))[begin:end], begin
            ):
                x, out = self._run(segment, x, shared, keeps_streams=keeps_all)
                shared.give(segment, out, self.layer_numbers, keeps_streams=keeps_all)
                for number, of_stack in out.items():
                    outputs[number].append(of_stack)
            residuals[layer_tap(end - 1)] = x
        if keeps_all:
            streams = self._in_order([concatenated([stream for _, stream in parts]) for parts in outputs])
            residuals |= {tap: streams[LAYERS, layer] for layer, tap in enumerate(every)}
            outputs = [[out for out, _ in parts] for parts in outputs]
        if cache is None:  # what only some segments have returned, for later ones
            outputs = [[(None, aux) for _, aux in parts] for parts in outputs]
        final = for_compute(self.last_norm)(x)
        new, aux = zip(*map(concatenated, filter(None, outputs)), strict=True)
        extended = None
        if cache is not None:
            extended = extend_cache(cache, inputs, new)
        reported = [of_stack for of_stack in aux if of_stack is not None]
        tapped = {name: (residuals | {FINAL: final})[name] for name in taps}
        return Hidden(final, extended, concatenated(reported).aux_losses() if reported else {}, tapped)

    def map_layers(
        self, visit: LayerFn, x: NamedArray, inputs: Inputs, given: Any = None, key: jax.Array | None = None
    ) -> Any:
        """Collects what `visit` returns at each layer: named arrays {layers, ...}, first layer first. No norm follows.

        Args:
            x: {batch, position, embed}, what the first layer is visited with.
            given: named arrays {layers, ...}, of which each layer gets its slice.
            key: for dropout; None means no dropout.
        """
        shared = ForwardPass(inputs, AttentionMask.of(inputs), key, None, stores=False)
        outputs: list[list[Any]] = [[] for _ in self.stacks]
        for segment in segments(tuple(zip(self.stack_of_layer, self.kinds_by_layer, strict=True))):
            x, out = self._run(segment, x, shared, visit, given)
            for number, of_stack in out.items():
                outputs[number].append(of_stack)
        return self._in_order([concatenated(parts) for parts in outputs])

    def _in_order(self, by_stack: Sequence[T]) -> T:
        """Named arrays {layers, ...} of each stack in one tree, from the first layer to the last."""
        if len(by_stack) == 1:
            return by_stack[0]
        places = np.argsort([layer for layers in self.layer_numbers for layer in layers])
        return jax.tree.map(lambda leaf: taken_layers(leaf, places), concatenated(by_stack), is_leaf=is_named)

    def _part(self, number: int, segment: Segment, shared: ForwardPass, given: tuple) -> tuple["Stack", tuple]:
        """The layers of a stack that are in the segment, and what each of them gets, {layers, ...}."""
        layers = self.layer_numbers[number]
        start, stop = (sum(one < end for one in layers) for end in (segment.start, segment.stop))
        part, layers = self.stacks[number].between(start, stop), layers[start:stop]
        if len(layers) < self.num_layers:
            given = jax.tree.map(lambda leaf: taken_layers(leaf, np.asarray(layers)), given, is_leaf=is_named)
        return part, (
            part.layers.stacked,
            NamedArray(jnp.asarray(layers, jnp.int32), (part.Layers,)),
            shared.cached(number, start, stop),
            shared.layer_keys(layers, self.num_layers),
            *given,
        )

    def _run(
        self,
        segment: Segment,
        x: NamedArray,
        shared: ForwardPass,
        visit: LayerFn | None = None,
        given: Any = None,
        *,
        keeps_streams: bool = False,
    ) -> tuple[NamedArray, dict[int, Any]]:
        """Runs the layers of a segment on {batch, position, embed}.

        Args:
            visit: None runs each layer on the output of the one before.
            given: {layers, ...}, for `visit`.
            keeps_streams: also return the residual stream after every layer.

        Returns:
            The residual stream after the last of them, and for each of their stacks what `visit` returned: (keys and values,
            auxiliary outputs) if it is None. With `keeps_streams`, pairs of that and of streams.
        """

        def run_block(
            block: Block, x: NamedArray, context: LayerContext, layer_cache: LayerCache | None, *, index, key, given
        ):
            x, new, aux = block(x, context, layer_cache, index=index, key=key)
            return x, (new if shared.stores or gives else None, aux)

        numbers = list(dict.fromkeys(number for number, _ in segment.pattern))
        own = given, shared.layer_inputs
        parts, per_layer = zip(*(self._part(number, segment, shared, own) for number in numbers), strict=True)
        first = parts[0]
        # Prompts have any length, which the configured backend may not allow.
        backend = AUTO if shared.stores else first.attn_backend
        kinds = [kind for _, kind in segment.pattern]
        gives = any(kind.gives for kind in kinds)
        contexts = [
            dataclasses.replace(context, taken=shared.taken.get(kind.takes))
            for kind, context in zip(
                kinds, layer_contexts(kinds, shared.inputs, shared.attention_mask, backend), strict=True
            )
        ]
        layout = current_layout()
        num_devices = 1 if layout is None else layout.mesh.size
        where = {"platform": current_platform(), "num_devices": num_devices}
        scan, _ = runs_as_scan(first.scan, self.num_layers, first.remat_policy, **where)

        # A visit looks into a layer's modules, so that they cannot be checkpointed one by one.
        policy = first.remat_policy if visit is None else for_whole_layers(first.remat_policy)

        def layer(
            place: int, x: NamedArray, block: Block, index: NamedArray, layer_cache: LayerCache | None, key, given, own
        ):
            context = dataclasses.replace(contexts[place], layer_input=own)
            x = layer_input(x)
            block = tiled_mlps(with_dropout_keys(block, key), first.mlp_tile_tokens)
            block = with_remat_modules(policy, block, scan=scan)
            x, out = (visit or run_block)(block, x, context, layer_cache, index=index, key=key, given=given)
            x = hax.auto_sharded(x)
            return x, (out, x) if keeps_streams else out

        layer = remat(policy, layer, scan=scan)
        stack_of_layer = [numbers.index(number) for number, _ in segment.pattern]
        Layers = [part.Layers for part in parts]
        x, out = scan_pattern(layer, hax.auto_sharded(x), per_layer, Layers, stack_of_layer, unroll=not scan)
        return x, dict(zip(numbers, out, strict=True))


def body_of(model: Any, what: str) -> Body:
    """The layers of a model. Raises `ConfigError` if it has none. Args: what: needs them, for messages."""
    body = next(iter(tree.modules(model, Body)), None)
    if body is None:
        raise ConfigError(f"{what}: this model has no stack of layers. Remove it")
    return body


def numbers_by_stack(stack_of_layer: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The numbers of each stack's layers. Args: stack_of_layer: the number of the stack that each layer is in."""
    return tuple(
        tuple(layer for layer, number in enumerate(stack_of_layer) if number == stack)
        for stack in range(max(stack_of_layer) + 1)
    )


def stacked(init: Callable[..., Any], Layers: Axis, keys: jax.Array) -> hnn.Stacked:
    """Initializes a layer with each key. Args: init: of one layer, from `key`."""
    kind: Any = SimpleNamespace(init=init)  # all that haliax reads of a module's class
    return hnn.Stacked.init(Layers, kind)(key=keys)


def concatenated(parts: Sequence[T]) -> T:
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


class Stack(Body, eqx.Module):
    """Layers of the same structure, with an axis `layers` of their own.

    Attributes:
        layers: the blocks; every parameter has the leading axis `layers`.
        final_norm: the norm before the head; None unless this is the last stack.
        kinds: the kinds of the layers; a shorter tuple is repeated.
        scan: run the layers as a scan (true), unrolled (false), or `auto`.
        remat_policy: what each layer saves for the backward pass.
        attn_backend: backend of attention, or `auto`.
        structure: stacks with the same number have the same parameters, apart from the number of layers.
        mlp_tile_tokens: tokens that an MLP computes at a time on each device; None means all.
        generation: how often the model had grown, with this stack; 0 for its initial layers (`jaxlm.models.growth`).
    """

    layers: hnn.Stacked
    final_norm: Norm | None
    kinds: tuple[LayerKind, ...] = eqx.field(static=True)
    scan: bool | Literal["auto"] = eqx.field(static=True)
    remat_policy: RematPolicy = eqx.field(static=True)
    attn_backend: str = eqx.field(static=True)
    structure: int = eqx.field(static=True, default=0)
    mlp_tile_tokens: int | None = eqx.field(static=True, default=None)
    generation: int = eqx.field(static=True, default=0)

    @property
    def stacks(self) -> tuple["Stack", ...]:
        return (self,)

    @property
    def stack_of_layer(self) -> tuple[int, ...]:
        return (0,) * self.Layers.size

    @property
    def splits(self) -> tuple[SplitMap, ...]:
        return ()

    @property
    def Layers(self) -> Axis:
        """The axis that stacks the parameters of the blocks."""
        return self.layers.Block

    @property
    def form(self) -> Any:
        """The structure of the blocks, and the axes of their arrays. Equal if the layers fit into one stack."""
        leaves, structure = jax.tree.flatten(self.layers.stacked, is_leaf=is_named)
        axes = (tuple(axis for axis in leaf.axes if axis.name != LAYERS) for leaf in leaves if is_named(leaf))
        return tuple(axes), structure

    def kinds_between(self, start: int, stop: int) -> list[LayerKind]:
        """The kinds of layers `start` to `stop`."""
        return [self.kinds[at % len(self.kinds)] for at in range(start, stop)]

    def between(self, start: int, stop: int) -> "Stack":
        """Layers `start` to `stop` as a stack of their own. It has the final norm only if it has the last layer."""
        if (start, stop) == (0, self.Layers.size):
            return self
        stacked = layers_between(self.layers.stacked, start, stop)
        return dataclasses.replace(
            self,
            layers=dataclasses.replace(self.layers, stacked=stacked, Block=self.Layers.resize(stop - start)),
            final_norm=self.final_norm if stop == self.Layers.size else None,
            kinds=shortest_period(self.kinds_between(start, stop)),
        )

    def select(self, places: Sequence[int]) -> "Stack":
        """The layers at these places of the stack."""
        kinds = self.kinds_between(0, self.Layers.size)
        stacked = jax.tree.map(
            lambda leaf: taken_layers(leaf, np.asarray(places)), self.layers.stacked, is_leaf=is_named
        )
        layers = dataclasses.replace(self.layers, stacked=stacked, Block=self.Layers.resize(len(places)))
        return dataclasses.replace(self, layers=layers, kinds=shortest_period([kinds[place] for place in places]))

    def concat(self, upper: "Stack") -> "Stack":
        """The layers of both stacks, which must have the same structure, in one stack."""
        sizes = self.Layers.size, upper.Layers.size
        stacked = concatenated([self.layers.stacked, upper.layers.stacked])
        kinds = [*self.kinds_between(0, sizes[0]), *upper.kinds_between(0, sizes[1])]
        layers = dataclasses.replace(self.layers, stacked=stacked, Block=self.Layers.resize(sum(sizes)))
        return dataclasses.replace(upper, layers=layers, kinds=shortest_period(kinds))


def taken_layers(leaf: Any, places: np.ndarray | jax.Array) -> Any:
    """The layers at these places of an array; arrays without an axis of layers stay as they are. Places may be traced."""
    if not is_named(leaf) or LAYERS not in (names := [axis.name for axis in leaf.axes]):
        return leaf
    at = names.index(LAYERS)
    axes = (*leaf.axes[:at], leaf.axes[at].resize(places.shape[0]), *leaf.axes[at + 1 :])
    return NamedArray(jnp.take(leaf.array, places, axis=at, mode="clip"), axes)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Stacks(Body):
    """Several stacks. Their numbers are part of the paths of parameters: `body.0.layers...`, `body.1.layers...`.

    Attributes:
        stack_of_layer: the number of the stack that each layer is in.
    """

    parts: tuple[Stack, ...]
    stack_of_layer: tuple[int, ...] = ()
    splits: tuple[SplitMap, ...] = ()

    @staticmethod
    def of(parts: Sequence[Stack], stack_of_layer: Sequence[int], final_norm: Norm) -> "Stacks":
        """Stacks of which only the last one has the final norm."""
        *others, last = parts
        others = (dataclasses.replace(stack, final_norm=None) for stack in others)
        return Stacks((*others, dataclasses.replace(last, final_norm=final_norm)), tuple(stack_of_layer))

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return self.parts

    def unsplit(self) -> Body:
        """The inverse of the last split: joins the stacks that it has made, unless they differ in more than layers."""
        *earlier, split = self.splits
        if any(len({self.parts[number].form for number in numbers}) > 1 for numbers in split):
            return self
        parts = [functools.reduce(Stack.concat, (self.parts[number] for number in numbers)) for numbers in split]
        whole_of = {number: whole for whole, numbers in enumerate(split) for number in numbers}
        whole = Stacks.of(parts, [whole_of[number] for number in self.stack_of_layer], self.last_norm)
        return whole.parts[0] if len(parts) == 1 else dataclasses.replace(whole, splits=tuple(earlier))

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Stack]], tuple[tuple[int, ...], tuple[SplitMap, ...]]]:
        children = [(jax.tree_util.SequenceKey(number), stack) for number, stack in enumerate(self.parts)]
        return children, (self.stack_of_layer, self.splits)

    @classmethod
    def tree_unflatten(cls, layout: tuple[tuple[int, ...], tuple[SplitMap, ...]], stacks: Sequence[Stack]) -> "Stacks":
        return cls(tuple(stacks), *layout)
