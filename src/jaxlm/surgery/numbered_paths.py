"""The paths of layers with their numbers, which patterns by layer are searched for in."""

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.products.stored_weights import Weight
from jaxlm.models.base import LanguageModel
from jaxlm.models.stack_paths import path_before_splits
from jaxlm.models.stacks import Body


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
