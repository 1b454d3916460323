"""What is in a compiled program: each operation by kind, collectives with their bytes, and the library kernels it calls."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

DTYPE_BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
"""Bytes of an entry; those that are not here take one."""
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf"= (?P<shapes>\(.*?\)|\S+) (?P<kind>{'|'.join(COLLECTIVES)})(?P<start>-start)?\(")
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<dims>[\d,]*)\]")
LIBRARY_CALL = re.compile(r'custom_call_target="(?P<name>[^"]+)"')
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"?known_trip_count"?:?=?\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
# What XLA's rematerialization calls its copies.
_AGAIN = re.compile(r"%[\w.\-]+\.remat[\d.]* = ")
# TPUs sum and cut in one fusion, whose text is a whole all-reduce followed by a slice.
_SUMMED_AND_CUT = "all-reduce-scatter"
# Annotations of the compiler to itself: no kernel stands behind them.
_NO_KERNELS = (
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "GatherScatterIndicesBitpacked",
)


@dataclass(frozen=True)
class Collective:
    """One array of one collective instruction."""

    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the array that comes out."""
        return math.prod(self.shape) * DTYPE_BYTES.get(self.dtype, 1)


def collectives(hlo: str) -> Counter[Collective]:
    """How often each collective stands in the text of a compiled program; a loop's body counts once."""
    found: Counter[Collective] = Counter()
    for line in hlo.splitlines():
        found.update(collectives_of(line))
    return found


def collectives_per_run(hlo: str) -> Counter[Collective]:
    """How often each collective happens when the program runs: loops count as often as they turn.

    A loop whose turns cannot be read off counts once.
    """
    found: Counter[Collective] = Counter()
    bodies, entry = computations(hlo)
    for name, times in executed(bodies, entry):
        lines = bodies[name]
        if name.startswith(_SUMMED_AND_CUT):
            root = next(_SHAPE.search(line) for line in lines if line.lstrip().startswith("ROOT"))
            assert root is not None
            found[Collective("reduce-scatter", root["dtype"], _dims(root))] += times
            continue
        for line in lines:
            for collective in collectives_of(line):
                found[collective] += times
    return found


def kernels(hlo: str) -> Counter[str]:
    """How often the program calls each library kernel (cuDNN, cuBLAS, Triton, Mosaic, oneDNN, ...) when it runs."""
    found: Counter[str] = Counter()
    bodies, entry = computations(hlo)
    for name, times in executed(bodies, entry):
        for line in bodies[name]:
            if (kernel := LIBRARY_CALL.search(line)) and kernel["name"] not in _NO_KERNELS:
                found[kernel["name"]] += times
    return found


def has_compiler_remat(hlo: str) -> bool:
    """Whether the compiler computes something again so that the program needs less memory."""
    return _AGAIN.search(hlo) is not None


def collectives_of(line: str) -> Iterator[Collective]:
    """The arrays of an instruction, if it is a collective or the start of one."""
    instruction = _COLLECTIVE.search(line)
    if instruction is None:
        return
    shapes = list(_SHAPE.finditer(instruction["shapes"]))
    if instruction["start"] and instruction["shapes"].startswith("("):
        # What an asynchronous one returns: operands, then results; those of an all-reduce are one and the same.
        if instruction["kind"] in ("all-gather", "reduce-scatter"):
            shapes = shapes[len(shapes) // 2 :]
        elif instruction["kind"] == "collective-permute":
            shapes = shapes[1:2]
    for shape in shapes:
        yield Collective(instruction["kind"], shape["dtype"], _dims(shape))


def _dims(shape: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(d) for d in shape["dims"].split(",") if d)


def executed(bodies: dict[str, list[str]], entry: str | None) -> Iterator[tuple[str, int]]:
    """Every computation that runs, once for each place that calls it, and how often from there."""
    pending = [(entry, 1)] if entry else []
    while pending:
        name, times = pending.pop()
        yield name, times
        for line in bodies[name]:
            inside = times * (turns(line, bodies) or 1) if " while(" in line else times
            pending += [(called, inside) for called in called_by(line) if called in bodies]


def turns(line: str, bodies: dict[str, list[str]]) -> int | None:
    """Of a loop: what the compiler notes, else the number that its counter is compared with, else None.

    Args:
        line: the loop's instruction.
        bodies: from `computations`.
    """
    if noted := _TRIPS.search(line):
        return int(noted[1])
    condition = _CONDITION.search(line)
    lines = bodies.get(condition[1], []) if condition else []
    limits = [int(limit[1]) for text in lines if (limit := _LIMIT.search(text))]
    return limits[0] if len(limits) == 1 and any("direction=LT" in text for text in lines) else None


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


def called_by(line: str) -> list[str]:
    """The computations that an instruction calls: a loop's body, a fusion's, the branches of a choice."""
    branches = _BRANCHES.search(line)
    return _CALLED.findall(line) + ([name.strip(" %") for name in branches[1].split(",")] if branches else [])


MATRIX = "matrix products"
ATTENTION = "attention"
FUSION = "elementwise and reductions"
COLLECTIVE = "collectives"
COPY = "copies"
OTHER = "other"
KINDS = (MATRIX, ATTENTION, FUSION, COLLECTIVE, COPY, OTHER)

# They hold other operations, which are counted themselves.
CONTAINERS = re.compile(r"(while|conditional|call)([.\d]*)$")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = .+? (?P<opcode>[a-z][\w\-]*)\(")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_COLLECTIVES = re.compile(r"all-gather|all-reduce|reduce-scatter|all-to-all|collective|ncclDevKernel|^send\b|^recv\b")
_PRODUCTS = re.compile(r"^(dot|convolution)\b|gemm|matmul|cublas|cutlass|onednn")
_ATTENTION = re.compile(r"(^|[/(])attention\b|fmha|flash|splash", re.IGNORECASE)
_MOVES = re.compile(
    r"(parameter|constant|copy|copy-start|copy-done|transpose|bitcast|reshape|slice|dynamic-slice|dynamic-update-slice"
    r"|broadcast|concatenate|pad|convert|tuple|get-tuple-element)$"
)
_NOT_FUSED = re.compile(r"^(custom-call|rng|sort|infeed|outfeed|fft|cholesky|triangular-solve)")


@dataclass(frozen=True)
class Operation:
    """An operation of a compiled program.

    Attributes:
        kind: one of `KINDS`.
        source: where in the traced program it comes from; empty where the compiler has lost that.
    """

    kind: str
    source: str = ""


def operations(hlo: str) -> dict[str, Operation]:
    """Every operation in the text of a compiled program by its name. A fusion is what is in it."""
    bodies, _ = computations(hlo)
    found: dict[str, Operation] = {}
    for lines in bodies.values():
        for line in lines:
            if instruction := _INSTRUCTION.match(line):
                source = _SOURCE.search(line)
                inside = _opcodes(line, instruction["opcode"], bodies)
                target = LIBRARY_CALL.search(line)
                kind = _kind(inside, source[1] if source else "", target[1] if target else "")
                found[instruction["name"]] = Operation(kind, source[1] if source else "")
    return found


def operation_by_name(name: str) -> Operation:
    """A guess for an operation of no known program, such as a library's kernel."""
    if _ATTENTION.search(name):
        return Operation(ATTENTION)
    if _COLLECTIVES.search(name):
        return Operation(COLLECTIVE)
    if _PRODUCTS.search(name):
        return Operation(MATRIX)
    if name.lower().startswith(("copy", "transpose", "memcpy", "memset")):
        return Operation(COPY)
    return Operation(FUSION if "fusion" in name else OTHER)


def _kind(opcodes: frozenset[str], source: str, target: str) -> str:
    if any(_COLLECTIVES.search(opcode) for opcode in opcodes):
        return COLLECTIVE
    if _ATTENTION.search(source) or _ATTENTION.search(target):
        return ATTENTION
    if any(_PRODUCTS.search(opcode) for opcode in opcodes) or _PRODUCTS.search(target):
        return MATRIX
    if all(_MOVES.match(opcode) for opcode in opcodes):
        return COPY
    return OTHER if any(_NOT_FUSED.search(opcode) for opcode in opcodes) else FUSION


def _opcodes(line: str, opcode: str, bodies: Mapping[str, list[str]]) -> frozenset[str]:
    """What an instruction does: its own opcode, or those of the computation that it fuses."""
    called = _CALLS.search(line) if opcode == "fusion" else None
    if called is None:
        return frozenset([opcode])
    found: frozenset[str] = frozenset()
    for inner in bodies.get(called[1], ()):
        if instruction := _INSTRUCTION.match(inner):
            found |= _opcodes(inner, instruction["opcode"], bodies)
    return found
