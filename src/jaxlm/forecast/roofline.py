"""Roofline estimate: the run time of a compiled program if each kernel runs as fast as the device allows.

The time of a matrix product is that of its FLOPs or of its memory traffic, whichever is longer; of fused attention,
that of its FLOPs; of everything else, that of its memory traffic (Williams et al. 2009, doi:10.1145/1498765.1498785).
Collectives and launch overhead are not counted.

Reads programs for NVIDIA GPUs as XLA prints them: each instruction outside fused computations is one kernel.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxlm.forecast.hlo import (
    COLLECTIVES,
    DTYPE_BYTES,
    Collective,
    called_by,
    collectives_of,
    computations,
    executed,
    trip_count,
)

_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)"
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<dims>[\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:] ?[{\[]([\d," ]*)')
_SCORES = re.compile(r'"intermediate_tensor_shape".*?"dimensions": ?\[([\d," ]*)\]')
_ATTENTION = "__cudnn$fmha"
# Instructions that move no data: aliases of existing values, and collectives.
_FREE = {
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "iota",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    *COLLECTIVES,
    *(f"{kind}-{end}" for kind in (*COLLECTIVES, "async", "copy") for end in ("start", "done", "update")),
}
_SLICES = {"dynamic-slice", "gather", "slice"}
# The backward pass of attention has five matrix products, the forward pass two.
_BACKWARD = 2.5


@dataclass(frozen=True)
class Speed:
    """Throughput of a device.

    Attributes:
        products: FLOP/s of large matrix products.
        attention: FLOP/s of fused attention.
        memory: bytes/s.
    """

    products: float
    attention: float
    memory: float


@dataclass(frozen=True)
class Seconds:
    """Run time of a program by kind of kernel.

    Attributes:
        products: matrix products.
        attention: fused attention.
        memory: everything else, which is bound by memory bandwidth.
    """

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0

    @property
    def total(self) -> float:
        """The sum: kernels run one after another."""
        return self.products + self.attention + self.memory

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.products + other.products, self.attention + other.attention, self.memory + other.memory)

    def __mul__(self, times: int) -> "Seconds":
        return Seconds(times * self.products, times * self.attention, times * self.memory)


@dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    line: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Size of all outputs."""
        return sum(math.prod(_dims(shape["dims"])) * DTYPE_BYTES.get(shape["dtype"], 1) for shape in self._shapes)

    @property
    def dims(self) -> tuple[int, ...]:
        """Shape of the first output."""
        return _dims(next(iter(self._shapes))["dims"])

    @property
    def _shapes(self) -> Iterator[re.Match[str]]:
        return _SHAPE.finditer(self.type)


_Computation = dict[str, _Instruction]


def roofline(hlo: str, speed: Speed) -> Seconds:
    """The run time of a program on one device.

    A conditional takes as long as its slowest branch, among the branches whose loops have known trip counts: attention
        to
    packed rows loops over as many documents as there are. Other loops with unknown trip counts count once.
    """
    bodies, entry = computations(hlo)
    return _Program.of(bodies, speed).seconds(entry) if entry else Seconds()


def overlapped(hlo: str, speed: Speed, seconds: Callable[[Collective], float]) -> float:
    """Seconds for which collectives run concurrently with kernels, in the compiler's schedule.

    Args:
        seconds: returns the run time of a collective.
    """
    bodies, entry = computations(hlo)
    program = _Program.of(bodies, speed)
    if entry is None:
        return 0.0
    return sum(count * program.overlapped(name, seconds) for name, count in executed(bodies, entry))


@dataclass(frozen=True)
class _Program:
    """A parsed program.

    Attributes:
        bodies: the lines of each computation.
        parsed: the instructions of each computation.
    """

    bodies: dict[str, list[str]]
    parsed: dict[str, _Computation]
    speed: Speed

    @staticmethod
    def of(bodies: dict[str, list[str]], speed: Speed) -> "_Program":
        return _Program(bodies, {name: _parse(lines) for name, lines in bodies.items()}, speed)

    def overlapped(self, name: str, seconds: Callable[[Collective], float]) -> float:
        """Overlap of collectives that start and end in a computation. They run one after another, while kernels run."""
        hidden, in_flight = (
            0.0,
            dict[str, float](),
        )  # remaining seconds of each collective, in the order of their starts
        for instruction in self.parsed[name].values():
            if instruction.op.endswith("-start") and (started := [*collectives_of(instruction.line)]):
                in_flight[instruction.name] = sum(map(seconds, started))
            elif instruction.op.endswith("-done"):
                in_flight.pop(instruction.operands[0], None)
            elif in_flight:
                kernel = self._instruction_seconds(instruction, self.parsed[name]).total
                for collective, remaining in in_flight.items():
                    in_flight[collective] = remaining - (overlap := min(kernel, remaining))
                    kernel, hidden = kernel - overlap, hidden + overlap
        return hidden

    def seconds(self, name: str) -> Seconds:
        """The run time of a computation, run once."""
        body = self.parsed[name]
        return sum((self._instruction_seconds(instruction, body) for instruction in body.values()), Seconds())

    def _instruction_seconds(self, instruction: _Instruction, body: _Computation) -> Seconds:
        called = [name for name in called_by(instruction.line) if name in self.parsed]
        if instruction.op == "while":
            return sum(map(self.seconds, called), Seconds()) * (trip_count(instruction.line, self.bodies) or 1)
        if instruction.op == "conditional":
            known = [name for name in called if self._has_known_trip_counts(name)]
            return max(map(self.seconds, known or called), key=lambda seconds: seconds.total)
        if instruction.op == "call":
            return sum(map(self.seconds, called), Seconds())
        return Seconds() if instruction.op in _FREE else self._kernel(instruction, body)

    def _has_known_trip_counts(self, name: str) -> bool:
        """Whether all loops of a computation, also inside its calls, have known trip counts."""
        lines = self.bodies[name]
        called = (inner for line in lines for inner in called_by(line) if inner in self.parsed)
        loops = (line for line in lines if " while(" in line)
        return all(trip_count(loop, self.bodies) for loop in loops) and all(map(self._has_known_trip_counts, called))

    def _kernel(self, kernel: _Instruction, body: _Computation) -> Seconds:
        if _ATTENTION in kernel.line:
            return Seconds(attention=_attention_flops(kernel) / self.speed.attention)
        memory = self._traffic(kernel, body) / self.speed.memory
        if flops := self._flops(kernel, body):
            return Seconds(products=max(flops / self.speed.products, memory))
        return Seconds(memory=memory)

    def _flops(self, kernel: _Instruction, body: _Computation) -> float:
        """FLOPs of the matrix products in a kernel."""
        if contracted := _CONTRACTED.search(kernel.line):
            left = body[kernel.operands[0]].dims
            return 2.0 * math.prod(kernel.dims) * math.prod(left[d] for d in _dims(contracted[1]))
        called = (self.parsed[name] for name in called_by(kernel.line) if name in self.parsed)
        return sum(self._flops(instruction, fused) for fused in called for instruction in fused.values())

    def _traffic(self, kernel: _Instruction, body: _Computation) -> int:
        """Bytes that a kernel reads and writes."""
        operands = [body[name] for name in kernel.operands if name in body]
        called = [self.parsed[name] for name in called_by(kernel.line) if name in self.parsed]
        if kernel.op != "fusion" or len(called) != 1:
            return _bytes_written(kernel, body) + sum(_bytes_read(operand, [kernel], body) for operand in operands)
        fused = called[0]
        parameters = [instruction for instruction in fused.values() if instruction.op == "parameter"]
        users = {p.name: [i for i in fused.values() if p.name in i.operands] for p in parameters}
        root = next(instruction for instruction in fused.values() if instruction.is_root)
        return _bytes_written(root, fused) + sum(_bytes_read(p, users[p.name], fused) for p in parameters)


def _bytes_read(value: _Instruction, users: list[_Instruction], body: _Computation) -> int:
    """Bytes of a value that its users read: only the slices if they slice it, nothing if they update it in place."""
    needed = 0
    for user in users:
        is_first = bool(user.operands) and user.operands[0] == value.name
        if user.op == "bitcast":
            needed += _bytes_read(user, [i for i in body.values() if user.name in i.operands], body)
        elif user.op in _SLICES and is_first:
            needed += user.num_bytes
        elif not (user.op == "dynamic-update-slice" and is_first):
            return value.num_bytes
    return min(needed, value.num_bytes)


def _bytes_written(root: _Instruction, body: _Computation) -> int:
    """Bytes written to the output. An in-place update writes only its slice."""
    if root.op == "tuple":
        return sum(_bytes_written(body[name], body) for name in root.operands)
    if root.op == "bitcast" and root.operands[0] in body:
        return _bytes_written(body[root.operands[0]], body)
    if root.op == "dynamic-update-slice":
        return body[root.operands[1]].num_bytes
    return root.num_bytes


def _attention_flops(call: _Instruction) -> float:
    """FLOPs of cuDNN's causal attention, forward or backward: two products with the scores [B, N, T, S]."""
    scores = _SCORES.search(call.line)
    assert scores is not None, call.line
    return 2 * 2 * math.prod(_dims(scores[1])) * call.dims[-1] / 2 * (_BACKWARD if "Backward" in call.line else 1)


def _parse(lines: list[str]) -> _Computation:
    matches = (_INSTRUCTION.match(line) for line in lines)
    return {
        m["name"]: _Instruction(
            m["name"],
            m["type"],
            m["op"],
            tuple(_OPERAND.findall(m["rest"].split(")")[0])),
            m[0],
            m["root"] is not None,
        )
        for m in matches
        if m is not None
    }


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in re.findall(r"\d+", text))
