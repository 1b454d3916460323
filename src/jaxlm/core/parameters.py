"""What is known of a model's parameters besides their arrays: which are matrices, decay, are computed with in float32, or
are updated by a rule of their own.

A module describes its own parameters. Those of a module that does not, as in a user's own, are judged by path and axes.
"""

import abc
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis

from jaxlm.core import tree
from jaxlm.core.axes import EXPERTS, HEAD_SIZE, HEADS, KEY_HEADS, KV_HEADS, LAYERS

# In paths in lower case.
_EMBEDDING, _NORM_OR_BIAS = re.compile(r"(^|\.)(tokens|positions)(\.|$)|embedding$"), re.compile("norm|bias")
_STACKED = (LAYERS, EXPERTS)


class MatrixAxes(NamedTuple):
    """The axes of a parameter that maps `inputs` to `outputs`. Its other axes index separate matrices."""

    outputs: tuple[Axis, ...]
    inputs: tuple[Axis, ...]


class UpdateRule(abc.ABC):
    """How a parameter moves by its gradient alone, whatever the optimizer of the run is.

    Its gradient is excluded from the gradient norm and from clipping; the parameter has no moments, learning rate or weight
    decay. A skipped step skips it, and averages of the weights contain it. The gradient is the sum over the microbatches of a
    batch, divided by the loss scale if there is one, so a rule must not depend on its size.
    """

    @abc.abstractmethod
    def update(self, gradient: Any) -> Any:
        """What is added to the parameter. Args: gradient: an array, named if the parameter is, at least float32."""

    @abc.abstractmethod
    def __str__(self) -> str:
        """Says in a few words what it does, for the plan."""


@dataclass(frozen=True)
class SignUpdate(UpdateRule):
    """Moves each element by a fixed amount against the sign of its gradient. An element without a gradient stays.

    Source: Wang et al. 2024, Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts (arXiv:2408.15664),
    algorithm 1, if the gradient of an expert's bias is its load minus the mean load.

    Attributes:
        size: how far an element moves in a step.
    """

    size: float

    def update(self, gradient: Any) -> Any:
        return jax.tree.map(lambda g: -self.size * jnp.sign(g), gradient)

    def __str__(self) -> str:
        return f"{self.size:g} against the sign of the gradient"


@dataclass(frozen=True)
class NoUpdate(UpdateRule):
    """Leaves a parameter as it is: what other programs have as a buffer."""

    def update(self, gradient: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, gradient)

    def __str__(self) -> str:
        return "not trained"


@dataclass(frozen=True)
class Parameter:
    """Describes a parameter. The defaults are those of a bias: not a matrix, no weight decay.

    Attributes:
        matrix: its axes if it is a matrix, for optimizers with an update rule for these (Muon); None if it is none.
        decays: weight decay applies to it by default.
        float32: it is stored and computed with in at least float32 whatever `trainer.mp` says.
        embedding: only a few of its rows have a gradient in each step.
        rule: how it is updated, in place of the optimizer; None leaves it to that.
    """

    matrix: MatrixAxes | None = None
    decays: bool = False
    float32: bool = False
    embedding: bool = False
    rule: UpdateRule | None = None


VECTOR = Parameter()
"""A bias, a scale, the weight of a norm or of a depthwise convolution."""
TABLE = Parameter(embedding=True)
"""A table of embeddings, or an adapter of one."""
SCALE = Parameter(decays=True)
"""A parameter with weight decay that is not a matrix."""
FLOAT32_VECTOR = Parameter(float32=True)
"""A parameter of few elements whose rounding errors add up, such as the logarithm of a decay rate."""
FIXED = Parameter(rule=NoUpdate())
"""A number that is saved and loaded, but never trained."""


def matrix(outputs: Sequence[Axis], inputs: Sequence[Axis]) -> Parameter:
    """Describes a matrix, which decays."""
    return Parameter(MatrixAxes(tuple(outputs), tuple(inputs)), decays=True)


class DeclaresParameters(eqx.Module):
    """A module that describes its own parameters. Modules inside it describe theirs."""

    @abc.abstractmethod
    def parameters(self) -> Mapping[str, Parameter]:
        """Path in the module -> the parameter there, whether the module holds the array or not (frozen, masked)."""


def declared(model: Any) -> dict[str, Parameter]:
    """Path -> description of each parameter that a module describes, held or not. The innermost module decides."""
    found: dict[str, Parameter] = {}

    def visit(prefix: str, node: Any) -> None:
        if isinstance(node, DeclaresParameters):
            found.update({f"{prefix}.{name}".lstrip("."): one for name, one in node.parameters().items()})
        inner = lambda x: x is not node and isinstance(x, DeclaresParameters)  # noqa: E731
        for path, child in jax.tree_util.tree_flatten_with_path(node, is_leaf=inner)[0]:
            if inner(child):
                visit(f"{prefix}.{tree.dotted(path)}".lstrip("."), child)

    visit("", model)
    return found


def described(model: Any) -> dict[str, Parameter]:
    """Path -> description of each floating-point array: that of its module, or that of `judged`."""
    known = declared(model)
    axes = {
        path: leaf.axes if tree.is_named(leaf) else _plain_axes(leaf)
        for path, leaf in tree.leaves(model)
        if tree.is_inexact(leaf)
    }
    return {path: known[path] if path in known else judged(path, of_leaf) for path, of_leaf in axes.items()}


def float32_paths(model: Any) -> frozenset[str]:
    """The paths of the parameters that are computed with in float32 (`Parameter.float32`), held or not."""
    return frozenset(path for path, parameter in declared(model).items() if parameter.float32)


def split_by_rule(params: Any) -> tuple[Any, Any]:
    """Splits parameters, or a gradient, into (those that the optimizer updates, those with a rule of their own)."""
    own = {path for path, parameter in declared(params).items() if parameter.rule is not None}
    return tree.partition(params, tree.map_leaves(lambda path, _: path not in own, params))


def judged(path: str, axes: Sequence[Axis]) -> Parameter:
    """Describes a parameter of which nothing but its path and its axes is known: norms, biases and embeddings by their
    names, matrices by their two sides, of which the first is the output.
    """
    if _EMBEDDING.search(path.lower()):
        return TABLE
    if _NORM_OR_BIAS.search(path.lower()):
        return VECTOR
    sides = matrix_sides(axes)
    return matrix(*sides) if len(sides) == 2 else Parameter(decays=True)


def matrix_sides(axes: Sequence[Axis]) -> tuple[tuple[Axis, ...], ...]:
    """Groups the axes of one layer and expert into sides: heads and their size are one side, other axes are one each."""
    sides: list[tuple[Axis, ...]] = []
    for axis in axes:
        if axis.name in _STACKED:
            continue
        if axis.name == HEAD_SIZE and sides and sides[-1][-1].name in (HEADS, KV_HEADS, KEY_HEADS):
            sides[-1] += (axis,)
        else:
            sides.append((axis,))
    return tuple(sides)


def _plain_axes(array: Any) -> tuple[Axis, ...]:
    """Names for the axes of an array that has none, if there are two of them."""
    return (Axis("rows", array.shape[0]), Axis("columns", array.shape[1])) if array.ndim == 2 else ()
