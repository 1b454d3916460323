"""Reads compiled programs (HLO text): instructions, collectives with their bytes and devices, copies to the host, memory.

Devices are numbered in the order of the mesh. XLA writes the groups of devices that take part in a collective in four
forms: a list, a list of pairs (source, target), the numbers of an array reshaped and transposed, and the axes of a mesh.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
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


COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Bytes per element; dtypes that are not listed have one.
_DTYPE_BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\((?P<operands>[^)]*)"
)
_SHAPE = re.compile(r"(?P<dtype>[a-z][a-z\d]*)\[(?P<dims>[\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:] ?[{\[]([\d," ]*)')
_SOURCE = re.compile(r'op_name="([^"]*)"')
_LIBRARY_CALL = re.compile(r'custom_call_target="(?P<name>[^"]+)"')
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# A collective that a TPU's SparseCore runs beside the others is in a computation of its own.
_OFFLOADED = re.compile(r"custom-call-start\(.*called_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"?known_trip_count"?:?=?\{"n":"(\d+)"\}')
_TURNS = re.compile(r"/turns=([\d.e+\-]+)(?=/)")
_PRODUCTS = re.compile(r"^(dot|convolution)\b|gemm|matmul|cublas|cutlass|onednn")
_ATTENTION = re.compile(r"(^|[/(])attention\b|fmha|flash|splash", re.IGNORECASE)
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
FP8_PRODUCTS = "fp8 products"
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
        return _num_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
        type: dtype and shape of the output, or of each output.
        operands: names of the instructions that it reads.
        line: its text, with all attributes.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    line: str
    is_root: bool

    @property
    def outputs(self) -> list[tuple[str, tuple[int, ...]]]:
        """dtype and shape of each output."""
        return [(shape["dtype"], integers(shape["dims"])) for shape in _SHAPE.finditer(self.type)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first output."""
        return self.outputs[0][1]

    @property
    def num_bytes(self) -> int:
        """Size of all outputs."""
        return sum(_num_bytes(dtype, shape) for dtype, shape in self.outputs)

    @property
    def library_call(self) -> str:
        """The library kernel that it calls, or an annotation for the compiler; empty if it calls none."""
        target = _LIBRARY_CALL.search(self.line)
        return target["name"] if target else ""

    @property
    def group(self) -> Group | None:
        """The devices that take part, if it is a collective; None if it does not name them."""
        return group_of(self.line)

    @property
    def summed_axes(self) -> tuple[int, ...] | None:
        """The axes of the left operand that it sums over, if it is a matrix product that says so; else None."""
        axes = _CONTRACTED.search(self.line)
        return integers(axes[1]) if axes else None

    @property
    def source(self) -> str:
        """Name of the operation in the traced program; empty if the compiler dropped it."""
        metadata = _SOURCE.search(self.line)
        return metadata[1] if metadata else ""

    @property
    def in_attention(self) -> bool:
        """Tells whether the traced program has it in the named scope of attention."""
        return _ATTENTION.search(self.source) is not None

    def collectives(self) -> list[Collective]:
        """The output arrays, if it is a collective or the start of one."""
        kind, outputs = self.opcode.removesuffix("-start"), self.outputs
        if kind not in COLLECTIVES:
            return []
        if kind != self.opcode and self.type.startswith("("):
            # An asynchronous collective returns operands, then results; an all-reduce returns them once.
            if kind in ("all-gather", "all-to-all", "reduce-scatter"):
                outputs = outputs[len(outputs) // 2 :]
            elif kind == "collective-permute":
                outputs = outputs[len(self.operands) : 2 * len(self.operands)]
        return [Collective(kind, dtype, shape) for dtype, shape in outputs]


Computation = dict[str, Instruction]
"""The instructions of a computation by name, in order."""


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        computations: its computations by name.
        entry: name of the computation that runs first.
        fused: the computations that are a part of one kernel.
    """

    computations: dict[str, Computation]
    entry: str | None
    fused: frozenset[str] = frozenset()

    @staticmethod
    def parse(hlo: str) -> "Program":
        computations: dict[str, Computation] = {}
        current: Computation = {}
        entry = None
        for line in hlo.splitlines():
            if not line.startswith(" ") and (header := _COMPUTATION.match(line)):
                current = computations[header["name"]] = {}
                entry = header["name"] if header["entry"] else entry
            elif m := _INSTRUCTION.match(line):
                operands = tuple(_OPERAND.findall(m["operands"]))
                current[m["name"]] = Instruction(
                    m["name"], m["type"], m["opcode"], operands, line, is_root=m["root"] is not None
                )
        program = Program(computations, entry)
        instructions = (i for computation in computations.values() for i in computation.values())
        kernels = (i for i in instructions if i.opcode in ("fusion", "fusion-start", "async-start"))
        return dataclasses.replace(program, fused=frozenset(name for i in kernels for name in program.called_by(i)))

    def called_by(self, instruction: Instruction) -> list[str]:
        """The computations that an instruction calls: the body of a loop or fusion, or the branches of a conditional."""
        several = _BRANCHES.search(instruction.line) or _OFFLOADED.search(instruction.line)
        names = _CALLED.findall(instruction.line) + (several[1].split(",") if several else [])
        return [name for name in (name.strip(" %") for name in names) if name in self.computations]

    def trip_count(self, loop: Instruction) -> int | None:
        """The trip count of a loop: the compiler's annotation, else the limit of its counter, else None."""
        if annotation := _TRIPS.search(loop.line):
            return int(annotation[1])
        condition = _CONDITION.search(loop.line)
        lines = [i.line for i in self.computations.get(condition[1], {}).values()] if condition else []
        limits = [int(limit[1]) for line in lines if (limit := _LIMIT.search(line))]
        return limits[0] if len(limits) == 1 and any("direction=LT" in line for line in lines) else None

    def known_turns(self, loop: Instruction) -> float | None:
        """The trip count of a loop, else the number in its scope (`turns_scope`), else None."""
        expected = _TURNS.findall(loop.source)
        return self.trip_count(loop) or (float(expected[-1]) if expected else None)

    def turns(self, loop: Instruction) -> float:
        """Returns how often a loop runs; 1 if that is unknown."""
        return self.known_turns(loop) or 1.0

    def run_by(self, instruction: Instruction) -> list[str]:
        """The computations that an instruction may run. Of the branches of a conditional, those whose loops have known trip
        counts: attention to packed rows loops over their documents. All branches if none is known."""
        called = self.called_by(instruction)
        if instruction.opcode != "conditional":
            return called
        return [name for name in called if self._has_known_trip_counts(name)] or called

    def _has_known_trip_counts(self, name: str) -> bool:
        """Tells whether all loops of a computation, also inside its calls, have known trip counts."""
        instructions = self.computations[name].values()
        loops = (instruction for instruction in instructions if instruction.opcode == "while")
        called = (inner for instruction in instructions for inner in self.called_by(instruction))
        return all(map(self.trip_count, loops)) and all(map(self._has_known_trip_counts, called))

    def executed(self) -> Iterator[tuple[str, float]]:
        """Yields each executed computation, once per call site, with the number of executions from there (`turns`). Of the
        branches that a conditional may run (`run_by`), the one with the most instructions."""
        pending: list[tuple[str, float]] = [(self.entry, 1)] if self.entry else []
        while pending:
            name, count = pending.pop()
            yield name, count
            for instruction in self.computations[name].values():
                turns = self.turns(instruction) if instruction.opcode == "while" else 1
                called = self.run_by(instruction)
                if instruction.opcode == "conditional":
                    called = [max(called, key=self._num_instructions)]
                pending += [(inner, count * turns) for inner in called]

    def _num_instructions(self, name: str) -> int:
        """Of a computation and everything that it calls."""
        instructions = self.computations[name].values()
        called = (inner for instruction in instructions for inner in self.called_by(instruction))
        return len(instructions) + sum(map(self._num_instructions, called))


def turns_scope(turns: float) -> str:
    """The name of a scope that tells forecasts the trip count of a loop for which it depends on the data."""
    return f"turns={turns:g}"


def with_trip_count(hlo: str, trips: int) -> str:
    """The text with a trip count for the loops of the entry computation that have none."""
    lines, in_entry = [], False
    for line in hlo.splitlines():
        if not line.startswith(" ") and (header := _COMPUTATION.match(line)):
            in_entry = header["entry"] is not None
        if in_entry and (m := _INSTRUCTION.match(line)) and m["opcode"] == "while" and not _TRIPS.search(line):
            line += f', known_trip_count={{"n":"{trips}"}}'
        lines.append(line)
    return "\n".join(lines)


class Transfer(NamedTuple):
    """A collective that a program runs `count` times, on groups of devices; `group` is None if it does not name them."""

    collective: Collective
    group: Group | None
    count: float


def transfers(program: Program) -> Iterator[Transfer]:
    """The collectives in one run of the program (`Program.executed`)."""
    for name, count in program.executed():
        instructions = program.computations[name].values()
        if name.startswith(_REDUCE_SCATTER_FUSION):
            root = next(instruction for instruction in instructions if instruction.is_root)
            group = next((i.group for i in instructions if i.opcode in COLLECTIVES), None)
            yield Transfer(Collective("reduce-scatter", *root.outputs[0]), group, count)
            continue
        for instruction in instructions:
            for collective in instruction.collectives():
                yield Transfer(collective, instruction.group, count)


def collectives_per_run(hlo: str) -> Counter[Collective]:
    """Counts how often each collective is executed in one run of the program."""
    counts: Counter[Collective] = Counter()
    for collective, _, count in transfers(Program.parse(hlo)):
        counts[collective] += round(count)
    return counts


def collectives_by_kind(hlo: str) -> dict[str, tuple[int, int]]:
    """Kind -> (number, output bytes) of the collectives in one run of the program."""
    totals: dict[str, tuple[int, int]] = {}
    for collective, number in collectives_per_run(hlo).items():
        count, num_bytes = totals.get(collective.kind, (0, 0))
        totals[collective.kind] = (count + number, num_bytes + number * collective.num_bytes)
    return totals


def kernels(hlo: str) -> Counter[str]:
    """Counts the calls of each library kernel (cuDNN, cuBLAS, Triton, Mosaic, oneDNN, ...) in one run of the program, and
    its matrix products in fp8, in whatever kernel they are."""
    counts: Counter[str] = Counter()
    program = Program.parse(hlo)
    for name, count in program.executed():
        for instruction in program.computations[name].values():
            if (kernel := instruction.library_call) and kernel not in _NO_KERNELS:
                counts[kernel] += round(count)
            if _is_fp8_product(instruction, program.computations[name]):
                counts[FP8_PRODUCTS] += round(count)
    return counts


def loops_counted_once(hlo: str) -> list[str]:
    """Sources of the loops with matrix products whose trip count depends on the data, so that they count once."""
    program = Program.parse(hlo)

    def has_products(name: str) -> bool:
        body = program.computations[name].values()
        texts = (text for instruction in body for text in (instruction.opcode, instruction.library_call))
        called = (inner for instruction in body for inner in program.called_by(instruction))
        return any(_PRODUCTS.search(text) or _ATTENTION.search(text) for text in texts) or any(
            map(has_products, called)
        )

    executed = (program.computations[name].values() for name, _ in program.executed())
    loops = (instruction for body in executed for instruction in body if instruction.opcode == "while")
    unknown = (loop for loop in loops if program.known_turns(loop) is None)
    return sorted({loop.source for loop in unknown if any(map(has_products, program.called_by(loop)))})


def _is_fp8_product(instruction: Instruction, computation: Computation) -> bool:
    if instruction.opcode != "dot":
        return instruction.library_call.endswith("$f8")
    dtypes = [dtype for name in instruction.operands for dtype, _ in computation[name].outputs]
    return all(dtype.startswith("f8") for dtype in dtypes)


def has_compiler_remat(hlo: str) -> bool:
    """Tells whether the compiler itself rematerializes values to save memory."""
    return _COMPILER_REMAT.search(hlo) is not None


def integers(text: str) -> tuple[int, ...]:
    """All integers in a text, such as a shape's dimensions."""
    return tuple(map(int, re.findall(r"\d+", text)))


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _DTYPE_BYTES.get(dtype, 1)


MATRIX = "matrix products"
ATTENTION = "attention"
FUSION = "elementwise and reductions"
COLLECTIVE = "collectives"
COPY = "copies"
OTHER = "other"
KINDS = (MATRIX, ATTENTION, FUSION, COLLECTIVE, COPY, OTHER)

# Control flow: the operations inside are counted instead.
CONTAINERS = re.compile(r"(while|conditional|call)([.\d]*)$")

_COLLECTIVES = re.compile(r"all-gather|all-reduce|reduce-scatter|all-to-all|collective|ncclDevKernel|^send\b|^recv\b")
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
    program = Program.parse(hlo)
    by_name: dict[str, Operation] = {}
    for computation in program.computations.values():
        for name, instruction in computation.items():
            kind = _kind(_opcodes(instruction, program), instruction.source, instruction.library_call)
            by_name[name] = Operation(kind, instruction.source)
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
    if any(map(_COLLECTIVES.search, opcodes)):
        return COLLECTIVE
    if _ATTENTION.search(source) or _ATTENTION.search(target):
        return ATTENTION
    if any(map(_PRODUCTS.search, opcodes)) or _PRODUCTS.search(target):
        return MATRIX
    if all(map(_MOVES.match, opcodes)):
        return COPY
    return OTHER if any(map(_NOT_FUSED.search, opcodes)) else FUSION


def _opcodes(instruction: Instruction, program: Program) -> frozenset[str]:
    """The opcode of an instruction, or those of the computation that it fuses."""
    called = program.called_by(instruction) if instruction.opcode == "fusion" else []
    if not called:
        return frozenset([instruction.opcode])
    fused = (inner for name in called for inner in program.computations[name].values())
    return frozenset(opcode for inner in fused for opcode in _opcodes(inner, program))


_HOST = "S(5)"  # XLA's number of the host's memory space, in the layout of an array


@dataclass(frozen=True)
class HostCopy:
    """Counts the bytes that an instruction copies.

    Attributes:
        there: from the device to the host.
        back: from the host to the device.
    """

    there: int = 0
    back: int = 0

    def __add__(self, other: "HostCopy") -> "HostCopy":
        return HostCopy(self.there + other.there, self.back + other.back)

    def __mul__(self, times: int) -> "HostCopy":
        return HostCopy(times * self.there, times * self.back)

    @property
    def num_bytes(self) -> int:
        return self.there + self.back


NO_COPY = HostCopy()


def host_copy(instruction: Instruction, body: Computation, program: Program) -> HostCopy:
    """Counts the bytes that an instruction copies between the two memories, or starts to copy."""
    if instruction.opcode in ("copy", "copy-start"):
        source, target = body[instruction.operands[0]], instruction.type.split("}")[0]
        return _copied(_HOST in target, _HOST in source.type, source.num_bytes)
    called = program.called_by(instruction) if instruction.opcode in ("fusion", "fusion-start", "async-start") else []
    if not called:
        return NO_COPY
    fused = program.computations[called[0]]
    root = next(inner for inner in fused.values() if inner.is_root)
    if root.opcode == "dynamic-update-slice":
        return _copied(_HOST in root.type, False, fused[root.operands[1]].num_bytes)
    reads_host = any(_HOST in inner.type for inner in fused.values() if inner.opcode == "parameter")
    return _copied(_HOST in root.type, reads_host, root.num_bytes)


def _copied(to_host: bool, from_host: bool, num_bytes: int) -> HostCopy:
    if to_host == from_host:
        return NO_COPY
    return HostCopy(there=num_bytes) if to_host else HostCopy(back=num_bytes)


def bytes_per_device(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on one device."""
    assert array.sharding is not None, "all arrays of a plan have one"
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def planned_bytes(call: jax.stages.Compiled) -> int | None:
    """Memory per device that a program needs; None if the compiler does not report it."""
    memory = call.memory_analysis()
    return memory and (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def host_bytes(call: jax.stages.Compiled) -> int:
    """Memory of the host per device that a program needs; 0 on CPUs, and if the compiler does not report it."""
    memory = call.memory_analysis()
    if memory is None:
        return 0
    return (
        memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        - memory.host_alias_size_in_bytes
        + memory.host_temp_size_in_bytes
    )


def argument_bytes(call: jax.stages.Compiled) -> int | None:
    """Memory per device of what a program is given; None if the compiler does not report it."""
    memory = call.memory_analysis()
    return memory and memory.argument_size_in_bytes
