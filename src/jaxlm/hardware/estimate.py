"""Estimates how long a compiled program takes on the devices of a topology: its kernels, its collectives, their overlap."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxlm.core.mesh import MeshShape
from jaxlm.hardware.hlo import Collective, Group, Instruction, Program, collectives_by_kind, transfers
from jaxlm.hardware.roofline import HostTraffic, Seconds, Speed, executed_flops, host_traffic, overlapped, roofline
from jaxlm.hardware.topologies import Topology

# Fractions of the peak that the kernels of a training step reach: matrix products 600 to 690 of 989 TFLOP/s, cuDNN's
# attention 350 to 500, and elementwise kernels 4.0 of 4.8 TB/s (public measurements on Hopper). Attention to long rows:
# docs/benchmarks.md, "Long rows on a card".
_PRODUCTS_SHARE, _ATTENTION_SHARE, _MEMORY_SHARE = 0.66, 0.43, 0.83
_LONG_ATTENTION_SHARE = 0.555


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
    """

    kernels: Seconds
    communication: float
    hidden: float | None
    flops: float | None
    collectives: dict[str, tuple[int, int]]
    host: tuple[HostTraffic, ...] = ()
    attention: Mapping[str, tuple[float, float]] = field(default_factory=dict)

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
    )


def speed_of(topology: Topology, dtype: Any) -> Speed:
    """What kernels reach on a chip. Args: dtype: of the matrix products."""
    chip = topology.chip
    peak, memory = chip.peak_of(dtype), chip.memory_bandwidth * _MEMORY_SHARE
    return Speed(peak * _PRODUCTS_SHARE, peak * _ATTENTION_SHARE, memory, peak * _LONG_ATTENTION_SHARE)


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
