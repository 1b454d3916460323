"""Which parameters are matrices, and which of their axes are inputs and outputs, for optimizers such as Muon.

A layer that knows declares it (`DeclaresMatrices`). Everywhere else the named axes of the array decide.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import equinox as eqx
from haliax import Axis

from jaxlm.core.axes import EXPERTS, HEAD_SIZE, HEADS, KEY_HEADS, KV_HEADS, LAYERS

_STACKED = (LAYERS, EXPERTS)


class MatrixAxes(NamedTuple):
    """The axes of a parameter that maps `inputs` to `outputs`. Its other axes index separate matrices."""

    outputs: tuple[Axis, ...]
    inputs: tuple[Axis, ...]


class DeclaresMatrices(eqx.Module):
    """A module that says which of its parameters are matrices. Its other parameters are none."""

    @abc.abstractmethod
    def matrix_axes(self) -> Mapping[str, MatrixAxes]:
        """Path in the module -> axes of the matrix there, whether the module holds the array or not (frozen, masked)."""


def matrix_sides(axes: Sequence[Axis]) -> tuple[tuple[Axis, ...], ...]:
    """Groups the axes of one layer and expert into sides: heads and their size are one side, other axes are one each.

    A parameter with two sides is a matrix.
    """
    sides: list[tuple[Axis, ...]] = []
    for axis in axes:
        if axis.name in _STACKED:
            continue
        if axis.name == HEAD_SIZE and sides and sides[-1][-1].name in (HEADS, KV_HEADS, KEY_HEADS):
            sides[-1] += (axis,)
        else:
            sides.append((axis,))
    return tuple(sides)
