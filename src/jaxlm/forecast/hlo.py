"""Reads compiled programs (HLO text): operations by kind, collectives with their bytes, library kernels."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

DTYPE_BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
"""Bytes per element; dtypes that are not listed have one."""
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
# Names of instructions that XLA's own rematerialization duplicates.
_COMPILER_REMAT = re.compile(r"%[\w.\-]+\.remat[\d.]* = ")
# TPUs run a reduce-scatter as one fusion, whose text is an all-reduce followed by a slice.
_REDUCE_SCATTER_FUSION = "all-reduce-scatter"
# Annotations for the compiler, which call no kernel.
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
    """One output array of a collective instruction."""

    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the output array."""
        return math.prod(self.shape) * DTYPE_BYTES.get(self.dtype, 1)


def collectives(hlo: str) -> Counter[Collective]:
    """Counts each collective in the text of a compiled program. Loop bodies count once."""
    counts: Counter[Collective] = Counter()
    for line in hlo.splitlines():
        counts.update(collectives_of(line))
    return counts


def collectives_per_run(hlo: str) -> Counter[Collective]:
    """Counts how often each collective is executed in one run of the program.

    Loops with unknown trip counts count once.
    """
    counts: Counter[Collective] = Counter()
    bodies, entry = computations(hlo)
    for name, count in executed(bodies, entry):
        lines = bodies[name]
        if name.startswith(_REDUCE_SCATTER_FUSION):
            root = next(_SHAPE.search(line) for line in lines if line.lstrip().startswith("ROOT"))
            assert root is not None
            counts[Collective("reduce-scatter", root["dtype"], _dims(root))] += count
            continue
        for line in lines:
            for collective in collectives_of(line):
                counts[collective] += count
    return counts


def kernels(hlo: str) -> Counter[str]:
    """Counts the calls of each library kernel (cuDNN, cuBLAS, Triton, Mosaic, oneDNN, ...) in one run of the
    program."""
    counts: Counter[str] = Counter()
    bodies, entry = computations(hlo)
    for name, count in executed(bodies, entry):
        for line in bodies[name]:
            if (kernel := LIBRARY_CALL.search(line)) and kernel["name"] not in _NO_KERNELS:
                counts[kernel["name"]] += count
    return counts


def has_compiler_remat(hlo: str) -> bool:
    """Whether the compiler itself rematerializes values to save memory."""
    return _COMPILER_REMAT.search(hlo) is not None


def collectives_of(line: str) -> Iterator[Collective]:
    """Yields the output arrays of an instruction if it is a collective or the start of one."""
    instruction = _COLLECTIVE.search(line)
    if instruction is None:
        return
    shapes = list(_SHAPE.finditer(instruction["shapes"]))
    if instruction["start"] and instruction["shapes"].startswith("("):
        # An asynchronous collective returns operands, then results; an all-reduce returns them once.
        if instruction["kind"] in ("all-gather", "reduce-scatter"):
            shapes = shapes[len(shapes) // 2 :]
        elif instruction["kind"] == "collective-permute":
            shapes = shapes[1:2]
    for shape in shapes:
        yield Collective(instruction["kind"], shape["dtype"], _dims(shape))


def _dims(shape: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(d) for d in shape["dims"].split(",") if d)


def executed(bodies: dict[str, list[str]], entry: str | None) -> Iterator[tuple[str, int]]:
    """Yields each executed computation, once per call site, with the number of executions from there."""
    pending = [(entry, 1)] if entry else []
    while pending:
        name, count = pending.pop()
        yield name, count
        for line in bodies[name]:
            inner_count = count * (trip_count(line, bodies) or 1) if " while(" in line else count
            pending += [(called, inner_count) for called in called_by(line) if called in bodies]


def trip_count(line: str, bodies: dict[str, list[str]]) -> int | None:
    """The trip count of a loop: the compiler's annotation, else the limit of its counter, else None.

    Args:
        line: the loop instruction.
        bodies: from `computations`.
    """
    if annotation := _TRIPS.search(line):
        return int(annotation[1])
    condition = _CONDITION.search(line)
    lines = bodies.get(condition[1], []) if condition else []
    limits = [int(limit[1]) for text in lines if (limit := _LIMIT.search(text))]
    return limits[0] if len(limits) == 1 and any("direction=LT" in text for text in lines) else None


def computations(hlo: str) -> tuple[dict[str, list[str]], str | None]:
    """The instructions of each computation, and the name of the entry computation."""
    bodies: dict[str, list[str]] = {}
    current: list[str] = []
    entry = None
    for line in hlo.splitlines():
        if not line.startswith(" ") and (header := _COMPUTATION.match(line)):
            current = bodies[header["name"]] = []
            entry = header["name"] if header["entry"] else entry
        else:
            current.append(line)
    return bodies, entry


def called_by(line: str) -> list[str]:
    """The computations that an instruction calls: the body of a loop or fusion, or the branches of a conditional."""
    branches = _BRANCHES.search(line)
    return _CALLED.findall(line) + ([name.strip(" %") for name in branches[1].split(",")] if branches else [])


MATRIX = "matrix products"
ATTENTION = "attention"
FUSION = "elementwise and reductions"
COLLECTIVE = "collectives"
COPY = "copies"
OTHER = "other"
KINDS = (MATRIX, ATTENTION, FUSION, COLLECTIVE, COPY, OTHER)

# Control flow: the operations inside are counted instead.
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
        source: name of the operation in the traced program; empty if the compiler dropped it.
    """

    kind: str
    source: str = ""


def operations(hlo: str) -> dict[str, Operation]:
    """All operations in the text of a compiled program, by name. The kind of a fusion is that of its contents."""
    bodies, _ = computations(hlo)
    by_name: dict[str, Operation] = {}
    for lines in bodies.values():
        for line in lines:
            if instruction := _INSTRUCTION.match(line):
                source = _SOURCE.search(line)
                opcodes = _opcodes(line, instruction["opcode"], bodies)
                target = LIBRARY_CALL.search(line)
                kind = _kind(opcodes, source[1] if source else "", target[1] if target else "")
                by_name[instruction["name"]] = Operation(kind, source[1] if source else "")
    return by_name


def operation_by_name(name: str) -> Operation:
    """Guesses the kind of an operation that is in no known program, such as a library kernel, from its name."""
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
    """The opcode of an instruction, or those of the computation that it fuses."""
    called = _CALLS.search(line) if opcode == "fusion" else None
    if called is None:
        return frozenset([opcode])
    opcodes: frozenset[str] = frozenset()
    for inner in bodies.get(called[1], ()):
        if instruction := _INSTRUCTION.match(inner):
            opcodes |= _opcodes(inner, instruction["opcode"], bodies)
    return opcodes
