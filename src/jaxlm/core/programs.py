"""What is in a compiled program: collectives with their bytes, and the library kernels it calls."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_COLLECTIVE = re.compile(
    r"= (?P<shapes>\(.*?\)|\S+)"
    r" (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<dims>[\d,]*)\]")
_KERNEL = re.compile(r'custom_call_target="(?P<name>[^"]+)"')
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"?known_trip_count"?:?=?\{"n":"(\d+)"\}')
# Annotations of the compiler to itself: no kernel stands behind them.
_NO_KERNELS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AllocateBuffer", "TopK")


@dataclass(frozen=True)
class Collective:
    """One array of one collective instruction."""

    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the array that comes out."""
        return math.prod(self.shape) * _BYTES.get(self.dtype, 1)


def collectives(hlo: str) -> Counter[Collective]:
    """How often each collective stands in the text of a compiled program; a loop's body counts once."""
    found: Counter[Collective] = Counter()
    for line in hlo.splitlines():
        found.update(_collectives_of(line))
    return found


def collectives_a_run(hlo: str) -> Counter[Collective]:
    """How often each collective happens when the program runs: loops count as often as they turn.

    A loop whose turns the compiler does not know counts once.
    """
    found: Counter[Collective] = Counter()
    for line, times in _executed(hlo):
        for collective in _collectives_of(line):
            found[collective] += times
    return found


def kernels(hlo: str) -> Counter[str]:
    """How often the program calls each library kernel (cuDNN, cuBLAS, Triton, Mosaic, oneDNN, ...) when it runs."""
    found: Counter[str] = Counter()
    for line, times in _executed(hlo):
        if (kernel := _KERNEL.search(line)) and kernel["name"] not in _NO_KERNELS:
            found[kernel["name"]] += times
    return found


def _collectives_of(line: str) -> Iterator[Collective]:
    instruction = _COLLECTIVE.search(line)
    if instruction is None:
        return
    shapes = list(_SHAPE.finditer(instruction["shapes"]))
    if instruction["start"] and instruction["shapes"].startswith("("):
        shapes = shapes[len(shapes) // 2 :]  # an asynchronous one names its operands first
    for shape in shapes:
        dims = tuple(int(d) for d in shape["dims"].split(",") if d)
        yield Collective(instruction["kind"], shape["dtype"], dims)


def _executed(hlo: str) -> Iterator[tuple[str, int]]:
    """Every instruction that runs, and how often."""
    bodies, entry = computations(hlo)
    pending = [(entry, 1)] if entry else []
    while pending:
        name, times = pending.pop()
        for line in bodies.get(name, ()):
            yield line, times
            trips = _TRIPS.search(line) if " while(" in line else None
            inside = times * int(trips[1]) if trips else times
            pending += [(called, inside) for called in _called(line)]


def computations(hlo: str) -> tuple[dict[str, list[str]], str | None]:
    """Instructions of every computation, and the name of the one that the program begins with."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    entry = None
    for line in hlo.splitlines():
        if not line.startswith(" ") and (header := _COMPUTATION.match(line)):
            current = found[header["name"]] = []
            entry = header["name"] if header["entry"] else entry
        else:
            current.append(line)
    return found, entry


def _called(line: str) -> list[str]:
    branches = _BRANCHES.search(line)
    return _CALLED.findall(line) + ([name.strip(" %") for name in branches[1].split(",")] if branches else [])
