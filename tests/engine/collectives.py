"""Reads the collectives out of compiled HLO text."""

import math
import re
from collections import Counter
from dataclasses import dataclass

_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "f16": 2, "s64": 8, "u8": 1}
_INSTRUCTION = re.compile(
    r"= (?P<shapes>\(.*?\)|\S+) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<dims>[\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One array of one collective instruction (a loop's body counts once)."""

    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the array that comes out."""
        return math.prod(self.shape) * _BYTES[self.dtype]


def collectives(hlo: str) -> Counter[Collective]:
    """How often each collective stands in the program."""
    found: Counter[Collective] = Counter()
    for instruction in _INSTRUCTION.finditer(hlo):
        for shape in _SHAPE.finditer(instruction["shapes"]):
            dims = tuple(int(d) for d in shape["dims"].split(",") if d)
            found[Collective(instruction["kind"], shape["dtype"], dims)] += 1
    return found
