"""Weight tables for import and export: which parameters a tensor in Hugging Face format contains, in which layout.

A layout lists the tensor's dimensions, each as a product of named axes: `heads head_size | embed` is a matrix whose rows
are the features of all heads. It omits the axes `layers`, `value_layers` and `experts` if the files have one tensor per
layer or expert.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlm.core.axes import EXPERTS, LAYERS, VALUE_LAYERS

Sizes = dict[str, int]
_LAYERS = {LAYERS: "layer", VALUE_LAYERS: "value_layer"}
_NUMBERS = {**_LAYERS, EXPERTS: "expert"}  # axis -> placeholder for its index in tensor names
_MAY_BE_LONGER = (("vocab",), ("position",))  # in a file than in the model; the additional rows are ignored


@dataclass(frozen=True)
class Part:
    """A parameter within a tensor.

    Attributes:
        path: path of the leaf, as in `jaxlm.core.tree`.
        dims: dimensions of the tensor, each as a product of named axes.
    """

    path: str
    dims: tuple[tuple[str, ...], ...]

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(int(np.prod([sizes[axis] for axis in dim], dtype=int)) for dim in self.dims)


@dataclass(frozen=True)
class Tensor:
    """A tensor in Hugging Face format.

    Attributes:
        name: tensor name, with `{layer}` (or `{value_layer}`) and `{expert}` as placeholders if there is one tensor per
            layer or expert.
        parts: the parameters that are concatenated in it.
        along: dimension of the concatenation.
        merged: number of leading dimensions that are stored as one. GPT-NeoX concatenates queries, keys and values
            within each head.
        numbers: the number in the name for each index of the first stacked axis; None counts from 0.
    """

    name: str
    parts: tuple[Part, ...]
    along: int = 0
    merged: int = 1
    numbers: tuple[int, ...] | None = None

    @property
    def stacked(self) -> tuple[str, ...]:
        """The axes that have one tensor per index."""
        return tuple(axis for axis, number in _NUMBERS.items() if f"{{{number}}}" in self.name)

    @property
    def is_stacked(self) -> bool:
        """Whether there is one tensor per layer."""
        return LAYERS in self.stacked

    def own_axes(self, leaf: Any) -> list[str]:
        """Names of a leaf's axes, without the stacked ones."""
        return [axis.name for axis in leaf.axes if axis.name not in self.stacked]

    def numbered(self, indices: Sequence[int]) -> str:
        """The tensor's name for one index of each stacked axis."""
        in_name = [*indices]
        if self.numbers is not None:
            in_name[0] = self.numbers[indices[0]]
        return self.name.format(**{_NUMBERS[axis]: n for axis, n in zip(self.stacked, in_name, strict=True)})

    def sizes(self, leaves: Mapping[str, Any]) -> Sizes:
        """Sizes of the axes of its parameters. Args: leaves: path -> parameter."""
        return axis_sizes([(part.path, leaves[part.path]) for part in self.parts if part.path in leaves])

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Shape of the tensor in the files, for a model with these axis sizes."""
        shape = self._unmerged(sizes)
        return (int(np.prod(shape[: self.merged])), *shape[self.merged :])

    def read(self, theirs: np.ndarray, number: int, sizes: Sizes, axes: Sequence[str]) -> np.ndarray:
        """Part `number` of the tensor, as a view with the given axes (without stacked ones) in this order."""
        part = self.parts[number]
        whole = theirs.reshape(self._unmerged(sizes)) if self.merged > 1 else theirs
        starts = [0] * whole.ndim
        starts[self.along] = sum(before.shape(sizes)[self.along] for before in self.parts[:number])
        extents = part.shape(sizes)
        section = whole[tuple(slice(s, s + n) for s, n in zip(starts, extents, strict=True))]
        order = [axis for dim in part.dims for axis in dim]
        return section.reshape([sizes[axis] for axis in order]).transpose([order.index(axis) for axis in axes])

    def write(self, parts: Sequence[np.ndarray], axes: Sequence[Sequence[str]], sizes: Sizes) -> np.ndarray:
        """Combines parameters to a tensor. `axes` has the axis names of each parameter (without stacked ones)."""
        arranged = []
        for part, array, names in zip(self.parts, parts, axes, strict=True):
            order = [axis for dim in part.dims for axis in dim]
            arranged.append(array.transpose([list(names).index(axis) for axis in order]).reshape(part.shape(sizes)))
        return np.concatenate(arranged, axis=self.along).reshape(self.shape(sizes))

    def longer_dims(self) -> set[int]:
        """Dimensions that may be longer in the file than in the model."""
        first, *others = self.parts
        return set() if others else {i for i, dim in enumerate(first.dims) if dim in _MAY_BE_LONGER}

    def _unmerged(self, sizes: Sizes) -> tuple[int, ...]:
        shapes = [part.shape(sizes) for part in self.parts]
        whole = [*shapes[0]]
        whole[self.along] = sum(shape[self.along] for shape in shapes)
        return tuple(whole)


def single(name: str, path: str, layout: str) -> Tensor:
    """A tensor with a single parameter."""
    return fused(name, {path: layout})


def fused(name: str, parts: dict[str, str], *, along: int = 0, merged: int = 1) -> Tensor:
    """A tensor with several parameters, given as path -> layout."""
    dims = {path: tuple(tuple(dim.split()) for dim in layout.split("|")) for path, layout in parts.items()}
    return Tensor(name, tuple(Part(path, part_dims) for path, part_dims in dims.items()), along, merged)


def expanded(
    tensors: Sequence[Tensor], sizes: Callable[[Tensor], Sizes]
) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """(name, tensor, indices of its stacked axes) for every tensor in the files, layer by layer.

    Args:
        sizes: axis sizes of a tensor's parameters.
    """
    for tensor in tensors:
        if not tensor.stacked:
            yield tensor.name, tensor, ()
    for axis in _LAYERS:
        stacked_tensors = [tensor for tensor in tensors if tensor.stacked[:1] == (axis,)]
        layers = [
            (number, tensor, index)
            for tensor in stacked_tensors
            for index, number in enumerate(tensor.numbers or range(sizes(tensor).get(axis, 0)))
        ]
        for _, tensor, index in sorted(layers, key=lambda layer: layer[0]):
            for rest in itertools.product(*(range(sizes(tensor)[axis]) for axis in tensor.stacked[1:])):
                yield tensor.numbered((index, *rest)), tensor, (index, *rest)


def axis_sizes(leaves: Sequence[tuple[str, Any]]) -> Sizes:
    """Sizes of all axes of the named leaves."""
    return {axis.name: axis.size for _, leaf in leaves for axis in leaf.axes}
