"""How long a compiled program takes if each of its kernels runs as fast as the device allows.

A matrix product takes as long as its operations or as its operands, whichever is longer; fused attention as long as its
operations; everything else as long as what it reads and writes takes from memory and back (Williams et al. 2009,
doi:10.1145/1498765.1498785). Collectives are not counted, nor what the host does between kernels.

Programs for NVIDIA cards are read as XLA prints them: one instruction outside of fused computations is one kernel.
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
    turns,
)

_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)"
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<dims>[\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:] ?[{\[]([\d," ]*)')
_SCORES = re.compile(r'"intermediate_tensor_shape".*?"dimensions": ?\[([\d," ]*)\]')
_ATTENTION = "__cudnn$fmha"
# Names for values that are somewhere already, and what moves no data of its own.
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
# The backward pass of attention makes five matrix products of the two of the forward pass.
_BACKWARD = 2.5


@dataclass(frozen=True)
class Speed:
    """What a device does in a second.

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
    """How long the parts of a program take.

    Attributes:
        products: matrix products.
        attention: fused attention.
        memory: everything else, which waits for memory.
    """

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0

    @property
    def total(self) -> float:
        """All of it, one kernel after another."""
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
        """Of all that comes out."""
        return sum(math.prod(_dims(shape["dims"])) * DTYPE_BYTES.get(shape["dtype"], 1) for shape in self._shapes)

    @property
    def dims(self) -> tuple[int, ...]:
        """Of the first array that comes out."""
        return _dims(next(iter(self._shapes))["dims"])

    @property
    def _shapes(self) -> Iterator[re.Match[str]]:
        return _SHAPE.finditer(self.type)


_Computation = dict[str, _Instruction]


def roofline(hlo: str, speed: Speed) -> Seconds:
    """Of one run of a program on one device.

    Of a choice the branch counts that takes longest, among those whose loops' turns are known: attention to packed rows is a
    loop over as many documents as there are. Other loops whose turns cannot be read off count once.
    """
    bodies, entry = computations(hlo)
    return _Walk.of(bodies, speed).seconds(entry) if entry else Seconds()


def overlapped(hlo: str, speed: Speed, seconds: Callable[[Collective], float]) -> float:
    """Seconds that collectives run beside kernels, in the order that the compiler has scheduled both in.

    Args:
        seconds: that a collective takes.
    """
    bodies, entry = computations(hlo)
    walk = _Walk.of(bodies, speed)
    if entry is None:
        return 0.0
    return sum(times * walk.overlapped(name, seconds) for name, times in executed(bodies, entry))


@dataclass(frozen=True)
class _Walk:
    """Through a program.

    Attributes:
        bodies: the lines of each computation.
        parsed: the same, read.
    """

    bodies: dict[str, list[str]]
    parsed: dict[str, _Computation]
    speed: Speed

    @staticmethod
    def of(bodies: dict[str, list[str]], speed: Speed) -> "_Walk":
        return _Walk(bodies, {name: _parsed(lines) for name, lines in bodies.items()}, speed)

    def overlapped(self, name: str, seconds: Callable[[Collective], float]) -> float:
        """Of the collectives that begin and end in a computation: one after another, while kernels run."""
        hidden, flying = 0.0, dict[str, float]()  # what is left of each, in the order that they began in
        for one in self.parsed[name].values():
            if one.op.endswith("-start") and (started := [*collectives_of(one.line)]):
                flying[one.name] = sum(map(seconds, started))
            elif one.op.endswith("-done"):
                flying.pop(one.operands[0], None)
            elif flying:
                left = self._of(one, self.parsed[name]).total
                for other, rest in flying.items():
                    flying[other] = rest - (now := min(left, rest))
                    left, hidden = left - now, hidden + now
        return hidden

    def seconds(self, name: str) -> Seconds:
        """Of one run of a computation."""
        found = (self._of(one, self.parsed[name]) for one in self.parsed[name].values())
        return sum(found, Seconds())

    def _of(self, one: _Instruction, around: _Computation) -> Seconds:
        called = [name for name in called_by(one.line) if name in self.parsed]
        if one.op == "while":
            return sum(map(self.seconds, called), Seconds()) * (turns(one.line, self.bodies) or 1)
        if one.op == "conditional":
            known = [name for name in called if self._is_known(name)]
            return max(map(self.seconds, known or called), key=lambda seconds: seconds.total)
        if one.op == "call":
            return sum(map(self.seconds, called), Seconds())
        return Seconds() if one.op in _FREE else self._kernel(one, around)

    def _is_known(self, name: str) -> bool:
        """Whether all loops of a computation say how often they turn."""
        lines = self.bodies[name]
        inside = (called for line in lines for called in called_by(line) if called in self.parsed)
        return all(turns(line, self.bodies) for line in lines if " while(" in line) and all(map(self._is_known, inside))

    def _kernel(self, one: _Instruction, around: _Computation) -> Seconds:
        if _ATTENTION in one.line:
            return Seconds(attention=_attention_flops(one) / self.speed.attention)
        memory = self._traffic(one, around) / self.speed.memory
        if flops := self._flops(one, around):
            return Seconds(products=max(flops / self.speed.products, memory))
        return Seconds(memory=memory)

    def _flops(self, one: _Instruction, around: _Computation) -> float:
        """Of the matrix products in a kernel."""
        if contracted := _CONTRACTED.search(one.line):
            left = around[one.operands[0]].dims
            return 2.0 * math.prod(one.dims) * math.prod(left[d] for d in _dims(contracted[1]))
        inside = (self.parsed[name] for name in called_by(one.line) if name in self.parsed)
        return sum(self._flops(other, body) for body in inside for other in body.values())

    def _traffic(self, one: _Instruction, around: _Computation) -> int:
        """Bytes that a kernel reads and writes."""
        operands = [around[name] for name in one.operands if name in around]
        called = [self.parsed[name] for name in called_by(one.line) if name in self.parsed]
        if one.op != "fusion" or len(called) != 1:
            return _written(one, around) + sum(_read(operand, [one], around) for operand in operands)
        body = called[0]
        parameters = [inner for inner in body.values() if inner.op == "parameter"]
        users = {p.name: [i for i in body.values() if p.name in i.operands] for p in parameters}
        root = next(inner for inner in body.values() if inner.is_root)
        return _written(root, body) + sum(_read(p, users[p.name], body) for p in parameters)


def _read(value: _Instruction, users: list[_Instruction], around: _Computation) -> int:
    """Bytes of a value that its users read: parts of it where they cut parts out, none where they write into it."""
    needed = 0
    for user in users:
        first = bool(user.operands) and user.operands[0] == value.name
        if user.op == "bitcast":
            needed += _read(user, [i for i in around.values() if user.name in i.operands], around)
        elif user.op in _SLICES and first:
            needed += user.num_bytes
        elif not (user.op == "dynamic-update-slice" and first):
            return value.num_bytes
    return min(needed, value.num_bytes)


def _written(root: _Instruction, around: _Computation) -> int:
    """Bytes that come out; of an array that is written into, the part."""
    if root.op == "tuple":
        return sum(_written(around[name], around) for name in root.operands)
    if root.op == "bitcast" and root.operands[0] in around:
        return _written(around[root.operands[0]], around)
    if root.op == "dynamic-update-slice":
        return around[root.operands[1]].num_bytes
    return root.num_bytes


def _attention_flops(one: _Instruction) -> float:
    """Of cuDNN's attention, forward or backward: two products with the scores [B, N, T, S], causal."""
    scores = _SCORES.search(one.line)
    assert scores is not None, one.line
    return 2 * 2 * math.prod(_dims(scores[1])) * one.dims[-1] / 2 * (_BACKWARD if "Backward" in one.line else 1)


def _parsed(lines: list[str]) -> _Computation:
    found = (_INSTRUCTION.match(line) for line in lines)
    return {
        m["name"]: _Instruction(
            m["name"],
            m["type"],
            m["op"],
            tuple(_OPERAND.findall(m["rest"].split(")")[0])),
            m[0],
            m["root"] is not None,
        )
        for m in found
        if m is not None
    }


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in re.findall(r"\d+", text))
