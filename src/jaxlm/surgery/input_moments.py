"""Sums first and second moments of the inputs of linear layers over tokens, and returns matrices layer by layer.

The models do not change: each layer is wrapped. The wrapper returns the layer's output and has a parameter that it never
reads. The cotangent of that parameter is *defined* as the moments of the inputs, so that one backward pass returns the sums
of all layers: a loop over layers stacks them, remat recomputes what they need, and a sharded batch is summed over devices,
as for any gradient.

    x {batch, position, *In}  ->  count, sum of x, sum of x x^T over the tokens that are not padding

For decompositions, named parameters are matrices of plain arrays, layer by layer (`by_layer`, `flat`).
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import AxisSpec, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import EMBED, HEAD_SIZE, LAYERS, VOCAB, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.stored_weights import Weight
from jaxlm.core.sharding import replicated
from jaxlm.core.tracing import CustomVjp
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.linear import Linear


def by_layer(compute: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Runs on one layer after the other, whole on every device: decompositions are not sharded."""
    return jax.lax.map(lambda layer: compute(*replicated(layer)), arrays)


def flat(array: NamedArray, *groups: tuple[hax.Axis, ...]) -> jax.Array:
    """The float32 array with one dimension for each group of axes."""
    ordered = array.rearrange(tuple(axis for group in groups for axis in group)).array.astype(jnp.float32)
    return ordered.reshape([hax.axis_size(group) for group in groups])


def heads_of_layers(layer: Linear, heads: str) -> jax.Array:
    """Reads a float32 weight [layers, heads, D, I]. With a bias, the last input is 1. Args: heads: their axis."""
    groups = [(layer.weight.resolve_axis(name),) for name in (LAYERS, heads, HEAD_SIZE, EMBED)]
    weight = flat(layer.weight, *groups)  # pyright: ignore[reportArgumentType]
    return (
        weight if layer.bias is None else jnp.concatenate([weight, flat(layer.bias, *groups[:3])[..., None]], axis=-1)
    )


def named(array: jax.Array, like: NamedArray) -> NamedArray:
    """The array with the axes of another one. Args: array: in any shape of as many elements."""
    return NamedArray(array.reshape(like.array.shape), like.axes)


_OTHER = "other_"  # the second of two input axes


class InputMoments(eqx.Module):
    """Sums over tokens, in float32. `layers` stands for the axes that stack layers, if there are any.

    Attributes:
        count: {layers}, number of tokens.
        total: {layers, *In}, sum of the inputs x.
        products: {layers, *In, *other_In}, sum of x x^T.
    """

    count: NamedArray
    total: NamedArray
    products: NamedArray

    @staticmethod
    def zeros(layer: Linear) -> "InputMoments":
        """Of no tokens."""
        stacked, inputs = _stacked(layer), axes_of(layer.In)
        shapes = (stacked, (*stacked, *inputs), (*stacked, *inputs, *(_other(axis) for axis in inputs)))
        return InputMoments(*(hax.zeros(axes, dtype=jnp.float32) for axes in shapes))

    @staticmethod
    def of(x: NamedArray, mask: NamedArray) -> "InputMoments":
        """Of one layer. Args: mask: {batch, position}, the tokens to count."""
        inputs = hax.where(mask, x.astype(jnp.float32), 0.0)
        features = [axis for axis in x.axes if axis not in mask.axes]
        others = inputs.rename({axis.name: _other(axis).name for axis in features})
        products = hax.dot(inputs, others, axis=mask.axes, precision=jax.lax.Precision.HIGHEST)
        sums = (hax.sum(mask.astype(jnp.float32)), hax.sum(inputs, axis=mask.axes), products)
        return InputMoments(*(total if isinstance(total, NamedArray) else hax.named(total, ()) for total in sums))


def moment_of_layers(layer: Linear, moments: InputMoments | None) -> jax.Array:
    """Second moments of the inputs of stacked layers [layers, I, I]. With a bias, the last input is 1.

    Args:
        moments: None for independent inputs.
    """
    if moments is None:
        num_layers, num_inputs = (layer.weight.axis_size(name) for name in (LAYERS, EMBED))
        num_inputs += layer.bias is not None
        return jnp.broadcast_to(jnp.eye(num_inputs), (num_layers, num_inputs, num_inputs))
    Layers, Inputs_, Others = ([axis] for axis in moments.products.axes)
    count = moments.count.array[:, None, None]
    second = flat(moments.products, tuple(Layers), tuple(Inputs_), tuple(Others)) / count
    if layer.bias is None:
        return second
    mean = flat(moments.total, tuple(Layers), tuple(Inputs_))[:, :, None] / count
    right = jnp.concatenate([mean, jnp.ones_like(count)], axis=1)
    return jnp.concatenate([jnp.concatenate([second, mean.swapaxes(1, 2)], axis=1), right], axis=2)


def input_moments(model: LanguageModel, paths: Collection[str], inputs: Inputs) -> dict[str, InputMoments]:
    """Path -> the moments of the inputs of the linear layer there. Traced.

    Raises:
        ConfigError: the model does not call one of the layers, or calls it on other things than tokens.
    """
    mask = NamedArray(inputs.segment_ids.array != 0, inputs.segment_ids.axes)
    layers = {path: layer for path, layer in tree.modules_by_path(model, Linear) if path in paths}
    called: set[str] = set()

    def some_scalar(moments: Mapping[str, InputMoments]) -> jax.Array:
        def observed(path: str, layer: Linear) -> "Linear | ObservedLinear":
            if path not in moments:
                return layer
            seen = functools.partial(called.add, path)
            return ObservedLinear(layer, moments[path], mask.broadcast_axis(_stacked(layer)), path, seen)

        final = tree.map_modules_by_path(model, Linear, ".*", observed).hidden(inputs).final
        for path, layer in layers.items():
            if VOCAB in {
                axis.name for axis in axes_of(layer.Out)
            }:  # the loss reads the head's weight; nothing calls it
                called.add(path)
                final = _observed(final, mask, moments[path])
        return jnp.sum(final.array.astype(jnp.float32))

    sums = jax.grad(some_scalar)({path: InputMoments.zeros(layer) for path, layer in layers.items()})
    if missed := sorted(layers.keys() - called):
        raise ConfigError(
            f"{', '.join(missed)}: the model does not call this layer on its way from tokens to hidden states, so the layer's"
            " inputs cannot be measured. Leave it out"
        )
    return sums


class ObservedLinear(eqx.Module):
    """A linear layer for `input_moments`.

    Attributes:
        moments: their cotangent is what is measured. Their values are never read.
        mask: bool {layers, batch, position}, the tokens to count.
        called: called when the layer is.
    """

    base: Linear
    moments: InputMoments
    mask: NamedArray
    path: str = eqx.field(static=True)
    called: Callable[[], object] = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        self.called()
        expected = {axis.name for axis in (*self.mask.axes, *axes_of(self.base.In))}
        if {axis.name for axis in x.axes} != expected:
            raise ConfigError(
                f"{self.path}: its inputs have the axes {', '.join(axis.name for axis in x.axes)}, so it is unknown which of"
                " them belong to padding, and they cannot be measured. Leave it out"
            )
        return self.base(_observed(x, self.mask, self.moments))

    def operand(self, x: NamedArray) -> NamedArray:
        """As `Linear.operand`."""
        return self.base.operand(x)

    @property
    def In(self) -> AxisSpec:
        return self.base.In

    @property
    def Out(self) -> AxisSpec:
        return self.base.Out

    @property
    def weight(self) -> Weight:
        return self.base.weight


@CustomVjp
def _observed(x: NamedArray, mask: NamedArray, moments: InputMoments) -> NamedArray:
    """x. The cotangent of `moments` is what they are of x."""
    return x


def _forward(
    x: NamedArray, mask: NamedArray, moments: InputMoments
) -> tuple[NamedArray, tuple[NamedArray, NamedArray]]:
    return x, (x, mask)


def _backward(residuals: tuple[NamedArray, NamedArray], d_x: NamedArray) -> tuple[NamedArray, None, InputMoments]:
    return d_x, None, InputMoments.of(*residuals)


_observed.defvjp(_forward, _backward)


def _stacked(layer: Linear) -> tuple[hax.Axis, ...]:
    matrix_axes = (*axes_of(layer.In), *axes_of(layer.Out))
    return tuple(axis for axis in layer.weight.axes if axis not in matrix_axes)


def _other(axis: hax.Axis) -> hax.Axis:
    return hax.Axis(f"{_OTHER}{axis.name}", axis.size)
