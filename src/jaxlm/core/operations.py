"""What kind of work each operation of a compiled program is: what a profile is grouped by."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxlm.core.programs import LIBRARY_CALL, computations

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
