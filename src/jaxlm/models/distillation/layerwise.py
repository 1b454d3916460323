"""Compares models layer by layer: what each layer computes by itself, and how far a residual stream is from a teacher's.

Layers that are compared one by one get the same inputs (`layer_errors`), and no gradient passes from one to another. Whole
streams are compared at equal fractions of the depth (`hidden_distance`), relative to the size of the teacher's stream,
which grows from layer to layer.

Source: layers one by one, first in how attention mixes tokens, then in what they return: Bick et al. 2024, "Transformers to
SSMs" (MOHAWK, arXiv:2408.10189), section 3. Whole streams, where each layer of the student learns from one of the
teacher's, at equal steps: Jiao et al. 2020, TinyBERT (arXiv:1909.10351), section 3.1.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, EMBED, HEAD_SIZE, KV_HEADS, LAYERS, POSITION, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.values.permutation import text_index
from jaxlm.models.base import EMBEDDING, Hidden, Inputs, LanguageModel, layer_tap
from jaxlm.models.flops import MixerWork
from jaxlm.models.mixers.attention import Attention
from jaxlm.models.mixers.base import ForCache, LayerCache, LayerContext
from jaxlm.models.stacks import Block, Body

Target = Literal["attention", "residual", "mixing"]
"""What of a layer is compared: the output of its attention, the residual stream after it, or its softmax of the scores."""
_TOKENS = (BATCH, POSITION)


class LayerStreams(eqx.Module):
    """Holds what every layer of a model reads and computes on a batch.

    Attributes:
        inputs: {layers, batch, position, embed}, the residual stream before the layer.
        targets: {layers, batch, position, embed}; for `mixing` {layers, batch, position, heads, head_size}, where the last
            axis are the tokens that are read.
    """

    inputs: NamedArray
    targets: NamedArray


class LayerErrors(eqx.Module):
    """Distances of layers from their targets, summed over the tokens that are not padding. float32 {layers}.

    Attributes:
        absolute: of each token the mean absolute difference; for `mixing` twice the total variation, averaged over heads.
        squared: squared differences.
        size: squares of the targets.
    """

    absolute: NamedArray
    squared: NamedArray
    size: NamedArray


_RESIDUAL = "Compare the residual stream instead (target: residual)"


def layer_body(model: Any, target: Target, what: str, otherwise: str = _RESIDUAL) -> Body:
    """The layers of a model. Leaves may be missing (None).

    Args:
        what: names the model, or the key that needs its layers, for messages.
        otherwise: what to do if they have no such target.

    Raises:
        ConfigError: they cannot be run one by one, or have no such target.
    """
    body = getattr(model, "body", None)
    if not isinstance(body, Body):
        raise ConfigError(f"{what}: a model of type {type(model).__name__} has no layers that jaxlm can run one by one")
    for block in (stack.layers.stacked for stack in body.stacks) if target != "residual" else ():
        if (found := len(tree.modules_by_path(block, Attention))) != 1:
            raise ConfigError(
                f"{what}: a layer of type {type(block).__name__} has {found} attention modules, so that it is not known what"
                f" its {target} is. {otherwise}"
            )
    return body


def unreached(trainable: Any, target: Target) -> list[str]:
    """The paths of parameters that no layer's target depends on, so that they have no gradient.

    Args:
        trainable: a model, with None for leaves to leave out.
    """
    if target == "residual":
        reached = [".layers."]
    else:
        after_scores = {"v_proj", "o_proj", "null_slot"} if target == "mixing" else set()
        reached = []
        for path, attention in tree.modules_by_path(trainable, Attention):
            reached += [
                f".{path}.{field.name}." for field in dataclasses.fields(attention) if field.name not in after_scores
            ]
            reached.append(f".{path.rpartition('.')[0]}.attn_norm.")
    return [path for path, _ in tree.leaves(trainable) if not any(part in f".{path}." for part in reached)]


def layer_streams(model: LanguageModel, inputs: Inputs, target: Target) -> LayerStreams:
    """Returns what the layers of a model read and compute, without dropout."""
    body = layer_body(model, target, "the teacher")

    def visit(block: Block, x: NamedArray, context: LayerContext, layer_cache: Any, *, index, key, given):
        after, compared = _run(block, x, context, target, index=index, key=None)
        return after, LayerStreams(x, compared)

    return body.map_layers(visit, _embedded(model, inputs), inputs)


def layer_errors(
    model: LanguageModel,
    inputs: Inputs,
    teacher: LayerStreams,
    target: Target,
    *,
    current: jax.Array | None = None,
    own_inputs: bool = False,
    key: jax.Array | None = None,
) -> LayerErrors:
    """Measures how far each layer is from the teacher's of the same number. Layers have gradients of their own error alone.

    Args:
        teacher: has as many layers.
        current: int32, the only layer that is measured and has a gradient; the others return zeros. None measures all.
        own_inputs: the layers read what the layers of this model before them return, instead of the teacher's streams.
        key: for dropout; None means no dropout.
    """
    body = layer_body(model, target, "the model")
    num_layers = teacher.inputs.axis_size(LAYERS)
    if body.num_layers != num_layers:
        raise ConfigError(
            f"the teacher has {num_layers} layers and the model {body.num_layers}. Layers are compared one by one: give a"
            " teacher with as many layers"
        )
    own = _embedded(model, inputs)
    if own.axis_size(EMBED) != (width := teacher.inputs.axis_size(EMBED)):
        raise ConfigError(
            f"the teacher's residual stream is {width} wide, and the model's {own.axis_size(EMBED)}. Give a teacher of the"
            " same width"
        )
    first = own if own_inputs else teacher.inputs[LAYERS, 0]
    mask = NamedArray(inputs.segment_ids.array != 0, inputs.segment_ids.axes)

    def measure(block: Block, x: NamedArray, targets: NamedArray, run: Callable[..., tuple[NamedArray, NamedArray]]):
        after, compared = run(block, x)
        return jax.lax.stop_gradient(after), _errors(compared, targets, mask, target)

    def visit(block: Block, x: NamedArray, context: LayerContext, layer_cache: Any, *, index, key, given: LayerStreams):
        x = x if own_inputs else given.inputs.rearrange(x.axes)
        x = jax.lax.stop_gradient(x)
        run = functools.partial(_run, context=context, target=target, index=index, key=key)
        if current is None:
            return measure(block, x, given.targets, run)
        zeros = LayerErrors(*(hax.named(jnp.zeros((), jnp.float32), ()) for _ in range(3)))
        done = lambda: (_forward(run, block, x) if own_inputs else x, zeros)  # noqa: E731
        after, errors = jax.lax.switch(
            jnp.clip(jnp.sign(index.array - current) + 1, 0, 2),
            [done, lambda: measure(block, x, given.targets, run), lambda: (x, zeros)],
        )
        return after, errors

    return body.map_layers(visit, first, inputs, teacher, key)


def _forward(run: Callable[..., tuple[NamedArray, NamedArray]], block: Block, x: NamedArray) -> NamedArray:
    """The stream after a layer that does not train now, of which nothing is kept for a backward pass."""
    frozen = jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf) if eqx.is_array(leaf) else leaf, block)
    return jax.lax.stop_gradient(run(frozen, x)[0])


def _embedded(model: LanguageModel, inputs: Inputs) -> NamedArray:
    """The input of the first layer. The compiler leaves out the rest of the pass."""
    return model.hidden(inputs, taps=(EMBEDDING,)).taps[EMBEDDING]


def _errors(compared: NamedArray, targets: NamedArray, mask: NamedArray, target: Target) -> LayerErrors:
    targets = jax.lax.stop_gradient(targets).astype(jnp.float32)
    difference = compared.astype(jnp.float32) - targets
    features = [axis for axis in difference.axes if axis.name not in _TOKENS]
    averaged = [axis for axis in features if target != "mixing" or axis.name != HEAD_SIZE]
    summed = [axis for axis in features if axis not in averaged]
    absolute = hax.mean(hax.sum(hax.abs(difference), summed) if summed else hax.abs(difference), averaged)
    over_tokens = lambda token: hax.sum(hax.where(mask, token, 0.0), _TOKENS)  # noqa: E731
    squares = [hax.sum(array * array, features) for array in (difference, targets)]
    return LayerErrors(*(over_tokens(token) for token in (absolute, *squares)))


def _run(
    block: Block, x: NamedArray, context: LayerContext, target: Target, *, index: NamedArray, key: jax.Array | None
) -> tuple[NamedArray, NamedArray]:
    """The stream after a layer, and what of the layer is compared; both in the order of the axes of tokens, then features."""
    recorded: list[NamedArray] = []
    if target != "residual":
        block = tree.map_modules(block, Attention, ".*", lambda attention: _Recorder(attention, recorded, target))
    after = block(x, context, None, index=index, key=key)[0].rearrange(x.axes)
    compared = after if target == "residual" else recorded[0]
    return after, compared.rearrange((*(axis for axis in x.axes if axis.name != EMBED), ...))


class _Recorder(Attention):
    """Attention that also puts what is compared of it into a list. Its model is gone once the layer has been traced."""

    base: Attention
    recorded: list = eqx.field(static=True)
    target: Target = eqx.field(static=True)

    def task(self, *args: Any) -> Any:
        return self.base.task(*args)

    def work(self, window: int | None) -> MixerWork:
        return self.base.work(window)

    def init_cache(self, Batch: Axis, capacity: int, dtype: Any) -> LayerCache:
        return self.base.init_cache(Batch, capacity, dtype)

    def __call__(
        self,
        x: NamedArray,
        context: LayerContext,
        cache: LayerCache | None,
        *,
        key: jax.Array | None = None,
        **options: Any,
    ) -> tuple[NamedArray, ForCache]:
        out, new = self.base(x, context, cache, key=key, **options)
        self.recorded.append(out if self.target == "attention" else self._mixing(x, context, **options))
        return out, new

    def _mixing(self, x: NamedArray, context: LayerContext, **options: Any) -> NamedArray:
        """{batch, position, heads, head_size}: the softmax. It is the attention whose values say which token they are of."""
        replaced: Callable[[Any], tuple[Any, Any]] = lambda attention: (attention.v_proj, attention.o_proj)  # noqa: E731
        v_proj, _ = replaced(self.base)
        KVHeads = next(axis for axis in axes_of(v_proj.Out) if axis.name == KV_HEADS)
        probe = eqx.tree_at(replaced, self.base, (_WhichToken(KVHeads, context.order), eqx.nn.Identity()))
        return probe(x, dataclasses.replace(context, attn_backend="reference"), None, **options)[0]


class _WhichToken(eqx.Module):
    """Values that are 1 at the index of their token in the text, and 0 elsewhere."""

    KVHeads: Axis = eqx.field(static=True)
    order: NamedArray | None

    def __call__(self, x: NamedArray) -> NamedArray:
        Index = Axis(HEAD_SIZE, x.axis_size(POSITION))
        one_hot = hax.nn.one_hot(text_index(x, self.order), Index, dtype=x.dtype)
        axes = (x.resolve_axis(BATCH), x.resolve_axis(POSITION), self.KVHeads, Index)
        return one_hot.broadcast_to(axes).rearrange(axes)


def with_streams(
    model: LanguageModel, inputs: Inputs, what: str, *, key: jax.Array | None = None
) -> tuple[Hidden, tuple[NamedArray, ...]]:
    """The model's output, and the residual stream {batch, position, embed} after each layer.

    Args:
        what: names the model in errors.
        key: for dropout; None means no dropout.
    """
    taps = [layer_tap(layer) for layer in range(layer_body(model, "residual", what).num_layers)]
    hidden = model.hidden(inputs, taps=taps, key=key)
    return hidden, tuple(hidden.taps[tap] for tap in taps)


def hidden_distance(own: Sequence[NamedArray], theirs: Sequence[NamedArray], mask: NamedArray) -> jax.Array:
    """The sum over tokens of `mask` times |s - t|^2 / |t|^2, averaged over the layers of the model. Scalar, float32.

    The last layers are compared with each other, and the others with those at the same fraction of the depth.

    Args:
        own, theirs: {batch, position, embed} of each layer. The teacher's has no gradient.
        mask: {batch, position}.
    """
    widths = [streams[0].axis_size(EMBED) for streams in (own, theirs)]
    if widths[0] != widths[1]:
        raise ConfigError(
            f"objective.hidden: the model's residual stream is {widths[0]} wide and the teacher's {widths[1]}, so they cannot"
            " be compared. Set objective.hidden: 0"
        )
    total = jnp.zeros((), jnp.float32)
    for layer, stream in enumerate(own, start=1):
        target = theirs[-(-layer * len(theirs) // len(own)) - 1].rearrange(stream.axes)
        target = jax.lax.stop_gradient(target).astype(jnp.float32)
        squares = [hax.sum(a * a, EMBED) for a in (stream.astype(jnp.float32) - target, target)]
        total += hax.sum(hax.where(mask != 0, mask * squares[0] / hax.maximum(squares[1], 1e-12), 0.0)).scalar()
    return total / len(own)


_LARGEST = 127
_VECTORS = (LAYERS, BATCH, POSITION)


class Int8Array(eqx.Module):
    """Vectors with a scale each, rounded to the nearest of 255 numbers.

    Attributes:
        values: int8 {layers, batch, position, embed}.
        scale: float32 {layers, batch, position}; 1 for a vector of zeros.
    """

    values: NamedArray
    scale: NamedArray

    @staticmethod
    def of(array: NamedArray) -> "Int8Array":
        array = array.astype(jnp.float32)
        features = [axis for axis in array.axes if axis.name not in _VECTORS]
        largest = hax.max(hax.abs(array), features)
        scale = hax.where(largest == 0, 1.0, largest / _LARGEST)
        return Int8Array(hax.round(array / scale).astype(jnp.int8), scale)

    def floats(self, dtype: jnp.dtype) -> NamedArray:
        """The vectors, with errors of at most half a scale."""
        return (self.values.astype(jnp.float32) * self.scale).rearrange(self.values.axes).astype(dtype)


class Int8Streams(eqx.Module):
    """`LayerStreams` in 8 bits.

    Attributes:
        dtype: of the streams that they were made of.
    """

    inputs: Int8Array
    targets: Int8Array
    dtype: jnp.dtype = eqx.field(static=True)

    @staticmethod
    def of(streams: LayerStreams) -> "Int8Streams":
        return Int8Streams(Int8Array.of(streams.inputs), Int8Array.of(streams.targets), streams.inputs.dtype)

    def floats(self) -> LayerStreams:
        """The streams, rounded."""
        return LayerStreams(self.inputs.floats(self.dtype), self.targets.floats(self.dtype))
