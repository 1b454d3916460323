"""Copies between the memory of a device and that of its host, in the text of a compiled program."""

from dataclasses import dataclass

from jaxlm.hardware.hlo import Computation, Instruction, Program

_HOST = "S(5)"  # XLA's number of the host's memory space, in the layout of an array


@dataclass(frozen=True)
class HostCopy:
    """What an instruction copies, in bytes.

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
    """What an instruction copies between the two memories, or starts to copy."""
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
