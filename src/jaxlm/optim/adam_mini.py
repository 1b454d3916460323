"""Adam-mini: Adam with one second moment for each block of a parameter.

Source: Zhang et al. 2024, Adam-mini: Use Fewer Learning Rates To Gain More (arXiv:2406.16793), algorithm 1, and its
algorithm 3 for the blocks of a transformer.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import EXPERTS, HEAD_SIZE, POSITION, STACKED_LAYERS, VOCAB
from jaxlm.core.field_types import BelowOne, NonNegativeFloat, PositiveFloat
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, chained, clip_by_norm
from jaxlm.optim.clipping import with_array
from jaxlm.optim.matrices import matrices
from jaxlm.reading.choices import choice

# A query or key head is one block, because its rows are used together in one product.
_QUERY_OR_KEY = re.compile(r"(^|\.)[qk]_proj\.weight$")
# Axes whose indices are separate parameters, or rows of an embedding.
_SEPARATE = (*STACKED_LAYERS, EXPERTS, VOCAB, POSITION)


class AdamMiniState(NamedTuple):
    """State of Adam-mini.

    Attributes:
        count: int32, number of updates so far.
        mean: running mean of the gradients.
        squares: path -> running mean over time of each block's mean squared gradient, with the axes that tell blocks apart.
    """

    count: jax.Array
    mean: Any
    squares: dict[str, NamedArray]


@choice(OptimizerConfig, "adam-mini")
class AdamMiniConfig(OptimizerConfig):
    """Clips the global norm, applies Adam-mini, adds weight decay. Its state is half as large as Adam's.

    All elements of a block have the same step size. A block is a head of the queries or the keys, a row (an output) of any
    other matrix, the row of a token or position in an embedding, or the whole of a norm or bias in a layer. Use the learning
    rate of Adam.

    Attributes:
        beta1: decay rate of the first moment (running mean of the gradients).
        beta2: decay rate of the second moment (running mean of the mean squared gradient of a block).
        epsilon: added to the square root of the second moment.
        max_grad_norm: maximum global gradient norm; larger gradients are scaled down to it. Null disables clipping.
    """

    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    epsilon: NonNegativeFloat = 1e-8
    max_grad_norm: PositiveFloat | None = 1.0

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        direction = self._direction()
        return chained(self, groups, num_steps, clip_by_norm(self.max_grad_norm), direction)

    def _direction(self) -> optax.GradientTransformation:
        def init_fn(params: Any) -> Any:
            squares = {path: hax.zeros(blocks, jnp.float32) for path, (_, blocks) in _blocks_by_path(params).items()}
            return AdamMiniState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), squares)

        def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            count, squares, sizes = state.count + 1, {}, {}
            for path, (gradient, blocks) in _blocks_by_path(updates).items():
                within = tuple(axis for axis in gradient.axes if axis not in blocks)
                square = hax.mean(hax.square(gradient.astype(jnp.float32)), within)
                squares[path] = self.beta2 * state.squares[path] + (1 - self.beta2) * square.rearrange(blocks)
                unbiased = squares[path] / (1 - self.beta2**count)
                sizes[path] = (hax.sqrt(unbiased) + self.epsilon).broadcast_axis(within).rearrange(gradient.axes)
            mean = jax.tree.map(lambda m, g: self.beta1 * m + (1 - self.beta1) * g, state.mean, updates)

            def direction(path: str, leaf: Any) -> Any:
                unbiased = tree.raw(leaf) / (1 - self.beta1**count)
                return with_array(leaf, (unbiased / sizes[path].array).astype(tree.raw(leaf).dtype))

            return tree.map_leaves(direction, mean), AdamMiniState(count, mean, squares)

        return optax.GradientTransformation(init_fn, update_fn)


def _blocks_by_path(params: Any) -> dict[str, tuple[NamedArray, tuple[Axis, ...]]]:
    """Path -> the parameter with named axes, and those of its axes that tell its blocks apart."""
    views, by_path = matrices(params), {}
    for path, leaf in tree.leaves(params):
        if (view := views.get(path)) is not None:
            whole = HEAD_SIZE if _QUERY_OR_KEY.search(path) else None
            blocks = (*view.stacked, *(axis for axis in view.outputs if axis.name != whole))
            by_path[path] = view.weight, blocks
        elif tree.is_named(leaf):
            by_path[path] = leaf, tuple(axis for axis in leaf.axes if axis.name in _SEPARATE)
        else:
            by_path[path] = hax.named(leaf, tuple(Axis(f"dim{n}", size) for n, size in enumerate(leaf.shape))), ()
    return by_path
