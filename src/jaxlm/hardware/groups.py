"""Which devices take part in a collective, in the text of a compiled program.

Devices are numbered in the order of the mesh. XLA writes groups in four forms: a list, a list of pairs (source, target), the
numbers of an array reshaped and transposed, and the axes of a mesh.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")
_LIST = re.compile(r"replica_groups=\{(\{.*?\})\}")
_ARRAY = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")


@dataclass(frozen=True)
class Group:
    """The devices that a collective runs on together, or the links of a permutation.

    Attributes:
        size: number of devices.
        span: how many devices there are from the first to the last of a group, at most, or from one end of a link to the
            other.
    """

    size: int
    span: int


def group_of(line: str) -> Group | None:
    """The groups of a collective. Args: line: its text. None if it does not say, which stands for all devices."""
    if pairs := _PAIRS.search(line):
        links = _lists(pairs[1])
        return Group(len({device for link in links for device in link}), max(abs(a - b) for a, b in links) + 1)
    groups = _groups(line)
    if not groups:
        return None
    return Group(max(map(len, groups)), max(max(group) - min(group) for group in groups) + 1)


def _groups(line: str) -> list[list[int]]:
    if listed := _LIST.search(line):
        return _lists(listed[1])
    if array := _ARRAY.search(line):
        shape = tuple(map(int, array[3].split(",")))
        numbers = np.arange(math.prod(shape)).reshape(shape)
        if array[4]:
            numbers = numbers.transpose(tuple(map(int, array[4].split(","))))
        return numbers.reshape(int(array[1]), int(array[2])).tolist()
    if mesh := _MESH.search(line):
        sizes = {name: int(size) for name, size in _AXIS.findall(mesh[1])}
        names = re.findall(r"'([^']+)'", mesh[2])
        if "(" in mesh[2] or not names:
            return []  # a part of an axis
        grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        moved = np.moveaxis(grid, [list(sizes).index(name) for name in names], range(-len(names), 0))
        return moved.reshape(-1, math.prod(sizes[name] for name in names)).tolist()
    return []


def _lists(text: str) -> list[list[int]]:
    return [list(map(int, numbers.split(","))) for numbers in re.findall(r"\{([\d,]+)\}", text)]
