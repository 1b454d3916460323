"""Estimates how long a compiled program takes on the devices of a topology, if each kernel runs at the roofline.

The time of a matrix product is that of its FLOPs or of its memory traffic, whichever is longer, and so is that of fused
attention with a window; of other fused attention, that of its FLOPs; of everything else, that of its memory traffic. Launch
overhead is not counted, and collectives are counted by themselves (`communication_seconds`).

Programs for NVIDIA GPUs are read as XLA prints them: each instruction outside fused computations is one kernel.

Source: Williams et al. 2009 (doi:10.1145/1498765.1498785).
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxlm.core.mesh import MeshShape
from jaxlm.hardware.hlo import (
    COLLECTIVES,
    NO_COPY,
    Collective,
    Computation,
    Group,
    HostCopy,
    Instruction,
    Program,
    collectives_by_kind,
    host_copy,
    integers,
    transfers,
)
from jaxlm.hardware.topologies import Speed, Topology, speed_of
from jaxlm.models.experts.mosaic_products import SCOPE

_SCORES = re.compile(r'"intermediate_tensor_shape".*?"dimensions": ?\[([\d," ]*)\]')
_UNMASKED = re.compile(r'"mask_type": ?"(NO_MASK|PADDING)"')
_WINDOW = re.compile(r'"sliding_window_length": ?"?([1-9]\d*)')
_ATTENTION, _MOSAIC = "__cudnn$fmha", 'custom_call_target="mosaic_gpu'
_FUSIONS = ("fusion", "fusion-start")
# Instructions that move no data: aliases of existing values, collectives, and the ends of what runs asynchronously.
_FREE = {
    *(
        "after-all",
        "bitcast",
        "constant",
        "get-tuple-element",
        "iota",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    ),
    *COLLECTIVES,
    *(f"{kind}-{end}" for kind in (*COLLECTIVES, "async", "copy") for end in ("start", "done", "update")),
    "fusion-done",
}
_SLICES = {"dynamic-slice", "gather", "slice"}
# The backward pass of attention has five matrix products, the forward pass two.
_BACKWARD = 2.5
_TILE = 128  # queries, and keys, that cuDNN is taken to multiply at a time (assumed)
_ONE_FLOP = Speed(products=1.0, attention=1.0, memory=math.inf, grouped=1.0)  # a "second" is a FLOP


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

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(times * self.products, times * self.attention, times * self.memory)


def roofline(hlo: str, speed: Speed, scope: str = "") -> Seconds:
    """The run time of a program on one device.

    A conditional takes as long as the slowest branch that it may run, see `Program.run_by`; loops have the turns of
    `Program.turns`.

    Args:
        scope: counts only the operations in this named scope of the traced program. Empty counts all.
    """
    program = Program.parse(hlo)
    return _Roofline(program, speed, scope).seconds(program.entry) if program.entry else Seconds()


def executed_flops(hlo: str, scope: str = "") -> float:
    """FLOPs of matrix products and fused attention in one run of a program on one device. Products in fp8 count half.

    Args:
        scope: as for `roofline`.
    """
    return roofline(hlo, _ONE_FLOP, scope).total


def loop_steps(hlo: str) -> float:
    """How often the bodies of loops run in one run of a program; a loop inside another runs in each step of that."""
    program = Program.parse(hlo)
    return sum(
        count * program.turns(instruction)
        for name, count in program.executed()
        for instruction in program.computations[name].values()
        if instruction.opcode == "while"
    )


class Overlap(NamedTuple):
    """A collective, its seconds in one run of the program, and for how many of them it runs beside kernels."""

    collective: Instruction
    seconds: float
    hidden: float


def overlapped(hlo: str, speed: Speed, seconds: Callable[[Instruction], float]) -> list[Overlap]:
    """Computes how long each collective runs, and how long concurrently with kernels, in the compiler's schedule.

    `seconds` returns the run time of an instruction's collectives, 0 for other instructions.
    """
    program = Program.parse(hlo)
    estimate, found = _Roofline(program, speed), []
    for name, count in program.executed():
        hidden = estimate.overlapped(name, lambda instruction, _: seconds(instruction))
        for instruction in program.computations[name].values():
            if taken := seconds(instruction):
                found.append(Overlap(instruction, count * taken, count * hidden.get(instruction.name, 0.0)))
    return found


@dataclass(frozen=True)
class HostTraffic:
    """Describes what a part of a program copies between the memory of the device and that of the host.

    Attributes:
        turns: how often the part runs: a loop over layers once for each.
        copies: in one turn.
        seconds: time of the copies of one turn.
        hidden: the part of it that runs beside kernels in the compiler's schedule.
        kernels: time of the kernels of one turn.
    """

    turns: float
    copies: HostCopy
    seconds: float
    hidden: float
    kernels: float

    @property
    def exposed(self) -> float:
        """Seconds of all turns for which the device waits."""
        return self.turns * max(0.0, self.seconds - self.hidden)


def host_traffic(hlo: str, speed: Speed, bandwidth: float) -> list[HostTraffic]:
    """The copies of each loop of a program, and of what is outside of loops. Args: bandwidth: bytes/s in one direction."""
    program = Program.parse(hlo)
    estimate = _Roofline(program, speed)
    traffic = []
    for name, turns in program.executed():
        body = program.computations[name]
        copies = sum((host_copy(instruction, body, program) for instruction in body.values()), NO_COPY)
        if copies.num_bytes and name not in program.fused:
            started = lambda instruction, body: host_copy(instruction, body, program).num_bytes / bandwidth  # noqa: E731
            hidden, kernels = sum(estimate.overlapped(name, started).values()), estimate.seconds(name).total
            traffic.append(HostTraffic(turns, copies, copies.num_bytes / bandwidth, hidden, kernels))
    return traffic


@dataclass(frozen=True)
class _Roofline:
    program: Program
    speed: Speed
    scope: str = ""

    def overlapped(self, name: str, seconds: Callable[[Instruction, Computation], float]) -> dict[str, float]:
        """Overlap of what starts and ends in a computation, by name. It runs one after another, while kernels run.

        Args:
            seconds: run time of what an instruction starts.
        """
        hidden: dict[str, float] = {}
        in_flight: dict[str, float] = {}  # remaining seconds of what has started, in the order of the starts
        computation = self.program.computations[name]
        for instruction in computation.values():
            if instruction.opcode.endswith("-start") and (started := seconds(instruction, computation)):
                in_flight[instruction.name] = started
            elif instruction.opcode.endswith("-done"):
                in_flight.pop(instruction.operands[0], None)
            elif in_flight:
                kernel = self._instruction_seconds(instruction, computation).total
                for other, remaining in in_flight.items():
                    in_flight[other] = remaining - (overlap := min(kernel, remaining))
                    kernel, hidden[other] = kernel - overlap, hidden.get(other, 0.0) + overlap
        return hidden

    def seconds(self, name: str) -> Seconds:
        """The run time of a computation, run once."""
        computation = self.program.computations[name]
        return sum((self._instruction_seconds(i, computation) for i in computation.values()), Seconds())

    def _instruction_seconds(self, instruction: Instruction, body: Computation) -> Seconds:
        if instruction.opcode in _FREE:
            return Seconds()
        called = self.program.run_by(instruction)
        if instruction.opcode == "while":
            return sum(map(self.seconds, called), Seconds()) * self.program.turns(instruction)
        if instruction.opcode == "conditional":
            return max(map(self.seconds, called), key=lambda seconds: seconds.total)
        if instruction.opcode == "call":
            return sum(map(self.seconds, called), Seconds())
        return self._kernel(instruction, body)

    def _kernel(self, kernel: Instruction, body: Computation) -> Seconds:
        if not self._is_counted(kernel) or host_copy(kernel, body, self.program) != NO_COPY:
            return Seconds()
        memory = self._traffic(kernel, body) / self.speed.memory
        if _ATTENTION in kernel.line:
            *_, num_keys = _scores_shape(kernel)
            seconds = _attention_flops(kernel) / self.speed.attention_to(num_keys)
            return Seconds(attention=max(seconds, memory) if _WINDOW.search(kernel.line) else seconds)
        if _MOSAIC in kernel.line and SCOPE in kernel.source:
            return Seconds(products=max(_grouped_flops(kernel, body) / self.speed.grouped, memory))
        if flops := self._flops(kernel, body):
            return Seconds(products=max(flops / self.speed.products, memory))
        return Seconds(memory=memory)

    def _is_counted(self, kernel: Instruction) -> bool:
        """Tells whether a kernel is in the scope. A fusion that has no name is if any of its operations is."""
        if not self.scope:
            return True
        fused = (self.program.computations[name] for name in self.program.called_by(kernel))
        sources = [kernel.source] if kernel.source else [i.source for contents in fused for i in contents.values()]
        return any(self.scope in source.split("/") for source in sources)

    def _flops(self, kernel: Instruction, body: Computation) -> float:
        """FLOPs of the matrix products in a kernel. Those in fp8 count half, because they are twice as fast."""
        if (axes := kernel.summed_axes) is not None:
            dtype, left = body[kernel.operands[0]].outputs[0]
            flops = 2.0 * math.prod(kernel.shape) * math.prod(left[axis] for axis in axes)
            return flops / 2 if dtype.startswith("f8") else flops
        called = (self.program.computations[name] for name in self.program.called_by(kernel))
        return sum(self._flops(instruction, fused) for fused in called for instruction in fused.values())

    def _traffic(self, kernel: Instruction, body: Computation) -> int:
        operands = [body[name] for name in kernel.operands if name in body]
        called = self.program.called_by(kernel)
        if kernel.opcode not in _FUSIONS or len(called) != 1:
            return _bytes_written(kernel, body) + sum(_bytes_read(operand, [kernel], body) for operand in operands)
        fused = self.program.computations[called[0]]
        parameters = [instruction for instruction in fused.values() if instruction.opcode == "parameter"]
        users = {p.name: [i for i in fused.values() if p.name in i.operands] for p in parameters}
        root = next(instruction for instruction in fused.values() if instruction.is_root)
        return _bytes_written(root, fused) + sum(_bytes_read(p, users[p.name], fused) for p in parameters)


def _bytes_read(value: Instruction, users: list[Instruction], body: Computation) -> int:
    """Bytes of a value that its users read: only the slices if they slice it, nothing if they update it in place."""
    needed = 0
    for user in users:
        is_first = bool(user.operands) and user.operands[0] == value.name
        if user.opcode == "bitcast":
            needed += _bytes_read(user, [i for i in body.values() if user.name in i.operands], body)
        elif user.opcode in _SLICES and is_first:
            needed += user.num_bytes
        elif not (user.opcode == "dynamic-update-slice" and is_first):
            return value.num_bytes
    return min(needed, value.num_bytes)


def _bytes_written(root: Instruction, body: Computation) -> int:
    """Bytes written to the output. An in-place update writes only its slice."""
    if root.opcode == "tuple":
        return sum(_bytes_written(body[name], body) for name in root.operands)
    if root.opcode == "bitcast" and root.operands[0] in body:
        return _bytes_written(body[root.operands[0]], body)
    if root.opcode == "dynamic-update-slice":
        return body[root.operands[1]].num_bytes
    return root.num_bytes


def _attention_flops(call: Instruction) -> float:
    """FLOPs of cuDNN's attention, forward or backward: two products with the scores, half of them if causal, or those of the
    tiles that a window touches."""
    share = 1 if _UNMASKED.search(call.line) else 0.5
    if window := _WINDOW.search(call.line):
        *_, num_queries, num_keys = _scores_shape(call)
        before = math.ceil((int(window[1]) - 1) / _TILE)
        tiles = sum(1 + min(row, before) for row in range(math.ceil(num_queries / _TILE)))
        share = min(share, tiles * _TILE**2 / (num_queries * num_keys))
    passes = _BACKWARD if "Backward" in call.line else 1
    return 2 * 2 * math.prod(_scores_shape(call)) * call.shape[-1] * share * passes


def _grouped_flops(call: Instruction, body: Computation) -> float:
    """FLOPs of grouped products of all rows, with matrices or, for the gradient of these, with other rows."""
    rows = next(shape for name in call.operands for _, shape in body[name].outputs if len(shape) == 2)
    summed = rows[1] if len(call.shape) == 2 else rows[0] / call.shape[0]
    return 2.0 * math.prod(call.shape) * summed


def _scores_shape(call: Instruction) -> tuple[int, ...]:
    """[B, N, T, S] of cuDNN's attention."""
    scores = _SCORES.search(call.line)
    assert scores is not None, call.line
    return integers(scores[1])


@dataclass(frozen=True)
class Estimate:
    """The estimate of a program on one device.

    Attributes:
        kernels: time of the kernels by kind.
        communication: time of the collectives.
        hidden: the part of it that runs beside kernels in the compiler's schedule; None if the kernels are not known.
        flops: FLOPs that the kernels execute, recomputation included; None if they are not known. Products in fp8 count half.
        collectives: kind -> (number, output bytes).
        host: the copies between the memories of device and host; empty if there are none, or the kernels are not known.
        attention: kind -> (seconds, of them beside kernels in the compiler's schedule) of the collectives within attention,
            which are those of context parallelism; empty if there are none, or the kernels are not known.
        loop_steps: how often the bodies of loops run; None if the kernels are not known.
    """

    kernels: Seconds
    communication: float
    hidden: float | None
    flops: float | None
    collectives: dict[str, tuple[int, int]]
    host: tuple[HostTraffic, ...] = ()
    attention: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    loop_steps: float | None = None

    @property
    def overlapped(self) -> float:
        """Seconds, with all communication and copies beside computation (optimistic)."""
        return max(self.kernels.total, self.communication, self.copying)

    @property
    def exposed(self) -> float:
        """Seconds, with no communication and no copies beside computation (pessimistic)."""
        return self.kernels.total + self.communication + self.copying

    @property
    def scheduled(self) -> float | None:
        """Seconds, with the overlap of the compiler's schedule; None if the kernels are not known."""
        if self.hidden is None:
            return None
        return self.exposed - self.hidden - sum(traffic.turns * traffic.hidden for traffic in self.host)

    @property
    def copying(self) -> float:
        """Seconds of all copies between the memories of device and host."""
        return sum(traffic.turns * traffic.seconds for traffic in self.host)


def estimate_kernels(hlo: str, topology: Topology, mesh: MeshShape, dtype: Any) -> Estimate:
    """The estimate of a program for NVIDIA GPUs, kernel by kernel. Args: dtype: of the matrix products."""
    speed = speed_of(topology, dtype)

    def seconds(instruction: Instruction) -> float:
        group = instruction.group
        return sum(collective_seconds(collective, group, topology, mesh) for collective in instruction.collectives())

    overlaps = overlapped(hlo, speed, seconds)
    attention: dict[str, tuple[float, float]] = {}
    for one in (one for one in overlaps if one.collective.in_attention):
        kind = one.collective.opcode.removesuffix("-start")
        before = attention.get(kind, (0.0, 0.0))
        attention[kind] = (before[0] + one.seconds, before[1] + one.hidden)
    return Estimate(
        kernels=roofline(hlo, speed),
        communication=communication_seconds(hlo, topology, mesh),
        hidden=sum(one.hidden for one in overlaps),
        flops=executed_flops(hlo),
        collectives=collectives_by_kind(hlo),
        host=tuple(host_traffic(hlo, speed, bandwidth)) if (bandwidth := topology.chip.host_bandwidth) else (),
        attention=attention,
        loop_steps=loop_steps(hlo),
    )


def communication_seconds(hlo: str, topology: Topology, mesh: MeshShape) -> float:
    """Time of all collectives of a program, one after another."""
    return sum(
        count * collective_seconds(collective, group, topology, mesh)
        for collective, group, count in transfers(Program.parse(hlo))
    )


def collective_seconds(collective: Collective, group: Group | None, topology: Topology, mesh: MeshShape) -> float:
    """Time of a ring over a group, at the bandwidth of its slowest link.

    Args:
        group: the devices; None for the likely ones. Parameters are gathered over the `data` axis and those of `context`,
            whose devices are `model` devices apart. Reductions over replicas span all devices.
    """
    if group is None:
        size = mesh.data * mesh.context
        group = Group(size, size * mesh.model)
        if size == 1 or (mesh.replica > 1 and collective.kind == "all-reduce"):
            group = Group(topology.num_chips, topology.num_chips)
    seconds = collective.num_bytes / topology.bandwidth(group.span)
    if collective.kind == "collective-permute":
        return seconds
    passes = {"all-reduce": 2.0, "reduce-scatter": float(group.size)}.get(collective.kind, 1.0)
    return passes * seconds * (group.size - 1) / group.size
