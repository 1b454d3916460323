"""The stacks of a body in the paths of parameters: `body.layers...` of a single stack, `body.0.layers...` of several."""

import re
from collections.abc import Sequence
from typing import Any

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.stored_weights import Weight
from jaxlm.models.base import LanguageModel
from jaxlm.models.stacks import Body

NEW_STACK = "new_stack"
"""In lists of patterns of parameter paths: the layers that the model has grown last."""
_NUMBER = re.compile(r"^body\.(\d+)\.")


def path_before_splits(path: str, body: Body) -> tuple[str, tuple[int, ...]]:
    """The path of a module as if no `split_at` had cut the layers, and the numbers of the layers that it stands for.

    A module outside the layers stands for layer 0 alone.
    """
    numbered = _NUMBER.match(path)
    if numbered is None:
        return path, body.layer_numbers[0] if path.startswith("body.layers.") else (0,)
    number, rest = int(numbered[1]), path[numbered.end() :]
    structures = list(dict.fromkeys(stack.structure for stack in body.stacks))
    whole = f"body.{structures.index(body.stacks[number].structure)}." if len(structures) > 1 else "body."
    return f"{whole}{rest}", body.layer_numbers[number]


def newest_stack(body: Body) -> int | None:
    """The number of the stack that the body has grown last; None if it has not grown. If that was cut, of its first part."""
    newest = max(stack.generation for stack in body.stacks)
    return next(number for number, stack in enumerate(body.stacks) if stack.generation == newest) if newest else None


def with_new_stack(patterns: Sequence[str], model: Any, key: str) -> list[str]:
    """Patterns of parameter paths, with one for the layers of the newest stack in place of `NEW_STACK`.

    Args:
        key: of the patterns, for messages.

    Raises:
        ConfigError: the model has not grown.
    """
    if NEW_STACK not in patterns:
        return list(patterns)
    body_path, body = next(iter(tree.modules_by_path(model, Body)), ("", None))
    newest = 0 if body is None else max(stack.generation for stack in body.stacks)
    if body is None or not newest:
        raise ConfigError(
            f"{key}: {NEW_STACK} given, but this model has not grown. It stands for the layers that the surgery `grow` has"
            " added last, in this phase or an earlier one"
        )
    numbers = [str(number) for number, stack in enumerate(body.stacks) if stack.generation == newest]
    layers = rf"^{body_path.replace('.', chr(92) + '.')}\.({'|'.join(numbers)})\.layers\."
    return [layers if pattern == NEW_STACK else pattern for pattern in patterns]


def without_layers_below(model: Any, first: int) -> Any:
    """The model with None in place of the leaves of all stacks that end before a layer."""
    (body_path, body), *_ = tree.modules_by_path(model, Body)
    below = tuple(
        f"{body_path}.{number}.layers." for number, layers in enumerate(body.layer_numbers) if layers[-1] < first
    )
    return tree.map_leaves(lambda path, leaf: None if path.startswith(below) else leaf, model) if below else model


class NumberedPaths:
    """The paths of the layers of a model that surgeries ask for, with the numbers of the layers.

    Attributes:
        known: path -> the numbered paths that it stands for.
        numbers: numbered path -> the number of the layer, or None for what is not in a layer.
    """

    def __init__(self, model: LanguageModel):
        self._model = model
        self.known: dict[str, list[str]] = {}
        self.numbers: dict[str, int | None] = {}

    @property
    def all(self) -> list[str]:
        return [name for names in self.known.values() for name in names]

    def numbered(self, path: str, weight: Weight) -> list[tuple[str, int | None]]:
        """(path with a number, the number) of every layer that a path stands for."""
        body = next(iter(tree.modules(self._model, Body)), None)
        whole, numbers = (path, (0,)) if body is None else path_before_splits(path, body)
        paths: list[tuple[str, int | None]] = [(whole, None)]
        count = next((axis.size for axis in weight.axes if axis.name == LAYERS), None)
        if count is not None:  # layers that are not those of a `Body` count from 0
            layer_numbers = numbers if len(numbers) == count else range(count)
            paths = [(whole.replace(".stacked.", f".{n}."), n) for n in layer_numbers]
        self.known[path] = [name for name, _ in paths]
        self.numbers.update(paths)
        return paths
