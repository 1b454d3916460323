"""One table for both ways: which parameters a tensor of theirs holds, and how they lie in it.

A layout is written as their dimensions, each a product of our axes: `heads head_size | embed` is a matrix whose rows are
the features of all heads. The axes `layers` and `experts` are not part of it where their tensors are one for each.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlm.core.axes import EXPERTS, LAYERS

Sizes = dict[str, int]
_NUMBERS = {LAYERS: "layer", EXPERTS: "expert"}
"""Axis of ours -> what its number is called in names."""
MAY_BE_LONGER = (("vocab",), ("position",))
"""Dimensions of which a file may have more than the model: rows behind the last token or position are left out."""


@dataclass(frozen=True)
class Part:
    """A parameter inside of a tensor.

    Attributes:
        path: of the leaf, as `jaxlm.core.tree` writes it.
        dims: their dimensions, each as names of our axes.
    """

    path: str
    dims: tuple[tuple[str, ...], ...]

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The part's extent in each of their dimensions."""
        return tuple(int(np.prod([sizes[axis] for axis in dim], dtype=int)) for dim in self.dims)


@dataclass(frozen=True)
class Tensor:
    """A tensor of their files.

    Attributes:
        name: with `{layer}` and `{expert}` for their numbers, where there is one for each.
        parts: the parameters in it, one after the other.
        along: the dimension in which they follow each other.
        merged: how many leading dimensions are written as one: GPT-NeoX has queries, keys and values after each other
            inside of every head.
    """

    name: str
    parts: tuple[Part, ...]
    along: int = 0
    merged: int = 1

    @property
    def stacked(self) -> tuple[str, ...]:
        """The axes of ours for each of whose numbers there is one."""
        return tuple(axis for axis, number in _NUMBERS.items() if f"{{{number}}}" in self.name)

    @property
    def is_stacked(self) -> bool:
        """Whether there is one for each layer."""
        return LAYERS in self.stacked

    def own_axes(self, leaf: Any) -> list[str]:
        """The names of a leaf's axes without those that are stacked."""
        return [axis.name for axis in leaf.axes if axis.name not in self.stacked]

    def numbered(self, numbers: Sequence[int]) -> str:
        """Its name for one number of each stacked axis."""
        return self.name.format(**{_NUMBERS[axis]: n for axis, n in zip(self.stacked, numbers, strict=True)})

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Theirs, for a model with these axes."""
        shape = self._unmerged(sizes)
        return (int(np.prod(shape[: self.merged])), *shape[self.merged :])

    def read(self, theirs: np.ndarray, number: int, sizes: Sizes, axes: Sequence[str]) -> np.ndarray:
        """The part with this number, as a view with our axes (without stacked ones) in the order given."""
        part = self.parts[number]
        whole = theirs.reshape(self._unmerged(sizes)) if self.merged > 1 else theirs
        starts = [0] * whole.ndim
        starts[self.along] = sum(before.shape(sizes)[self.along] for before in self.parts[:number])
        extents = part.shape(sizes)
        mine = whole[tuple(slice(s, s + n) for s, n in zip(starts, extents, strict=True))]
        order = [axis for dim in part.dims for axis in dim]
        return mine.reshape([sizes[axis] for axis in order]).transpose([order.index(axis) for axis in axes])

    def write(self, parts: Sequence[np.ndarray], axes: Sequence[Sequence[str]], sizes: Sizes) -> np.ndarray:
        """The tensor that holds these parameters; `axes` names those of each (without stacked ones)."""
        in_step_layout = []
        for part, array, own in zip(self.parts, parts, axes, strict=True):
            order = [axis for dim in part.dims for axis in dim]
            in_step_layout.append(array.transpose([list(own).index(axis) for axis in order]).reshape(part.shape(sizes)))
        return np.concatenate(in_step_layout, axis=self.along).reshape(self.shape(sizes))

    def longer_dims(self) -> set[int]:
        """Dimensions of theirs that may be longer than ours."""
        first, *others = self.parts
        return set() if others else {i for i, dim in enumerate(first.dims) if dim in MAY_BE_LONGER}

    def _unmerged(self, sizes: Sizes) -> tuple[int, ...]:
        shapes = [part.shape(sizes) for part in self.parts]
        whole = [*shapes[0]]
        whole[self.along] = sum(shape[self.along] for shape in shapes)
        return tuple(whole)


def one(name: str, path: str, layout: str) -> Tensor:
    """A tensor that is one parameter."""
    return Tensor(name, (_part(path, layout),))


def fused(name: str, parts: dict[str, str], *, along: int = 0, merged: int = 1) -> Tensor:
    """A tensor that holds several parameters: path -> layout."""
    return Tensor(name, tuple(_part(path, layout) for path, layout in parts.items()), along, merged)


def _part(path: str, layout: str) -> Part:
    return Part(path, tuple(tuple(dim.split()) for dim in layout.split("|")))


def expanded(tensors: Sequence[Tensor], sizes: Sizes) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """(name, tensor, numbers) of everything in their files, layer by layer; `numbers` are those of its stacked axes.

    Args:
        sizes: of our axes.
    """
    for tensor in tensors:
        if not tensor.stacked:
            yield tensor.name, tensor, ()
    for layer in range(sizes.get(LAYERS, 0)):
        for tensor in (tensor for tensor in tensors if tensor.stacked):
            assert tensor.stacked[0] == LAYERS, tensor.name
            for rest in itertools.product(*(range(sizes[axis]) for axis in tensor.stacked[1:])):
                yield tensor.numbered((layer, *rest)), tensor, (layer, *rest)


def axis_sizes(leaves: Sequence[tuple[str, Any]]) -> Sizes:
    """Axis name -> size over all named leaves."""
    return {axis.name: axis.size for _, leaf in leaves for axis in leaf.axes}
