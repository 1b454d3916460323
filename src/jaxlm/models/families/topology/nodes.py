"""The tree that a model is written as: layers, and what groups them."""

import abc
from dataclasses import dataclass, field
from typing import Any, ClassVar

import draccus
import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt, check_fields
from jaxlm.reading.choices import choice


@dataclass(frozen=True)
class Node(draccus.ChoiceRegistry, abc.ABC):
    """A layer, or a group of them. `type:` says which."""


class GroupNode(Node):
    """Nodes that run one after the other."""

    layers: list[Node]

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(self.layers))  # the config is a static field: it must be hashable


@choice(Node, "stacked")
class StackedNode(GroupNode):
    """Runs its layers one after the other.

    Attributes:
        layers: layers and groups of layers, from first to last.
    """

    layers: list[Node] = field(kw_only=True)


@choice(Node, "nested")
class NestedNode(GroupNode):
    """Repeats a unit of layers. Each repetition has its own parameters. They run as one scan.

    Attributes:
        layers: layers and groups of layers of the unit, from first to last.
        repeat: number of repetitions.
    """

    layers: list[Node] = field(kw_only=True)
    repeat: PositiveInt = 1


@choice(Node, "residual")
class ResidualNode(GroupNode):
    """x + f(x), where f runs the layers one after the other. For pre-norm, the first of them is a norm.

    Attributes:
        layers: layers and groups of layers of f, from first to last. The last one has as many output features as come in.
    """

    layers: list[Node] = field(kw_only=True)


@dataclass(frozen=True)
class LayerNode(Node):
    """A layer.

    Attributes:
        hidden_dim: features of the input. Null means what comes in; any other number must be the same.
    """

    hidden_dim: PositiveInt | None = None
    role: ClassVar[str]
    """The name of its parameters in their paths."""

    def check(self, width: int, path: str) -> None:
        """Raises `ConfigError`, which names `path`, if there is no such layer for an input of `width` features."""
        check_fields(self, path)
        if self.hidden_dim not in (None, width):
            raise ConfigError(
                f"{path}.hidden_dim: {self.hidden_dim} given, but {width} features come in. Remove it, set it to {width}, or"
                " change what is before it"
            )
        self.check_keys(width, path)

    def check_keys(self, width: int, path: str) -> None:
        """Raises `ConfigError` if the keys do not suit each other, or an input of `width` features."""

    def output_width(self, width: int) -> int:
        """Features of the output, for an input of `width` features."""
        return width

    @abc.abstractmethod
    def init(self, width: int, std: float, *, key: jax.Array) -> Any:
        """Initializes the layer for `width` features, with weights of this standard deviation."""

    def num_weights(self, width: int) -> int:
        """Number of weights in the matrix products of a token."""
        return 0
