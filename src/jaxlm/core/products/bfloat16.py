"""Whether a device multiplies matrices faster in bfloat16 than in float32, which decides what `trainer.mp: auto` is."""

import functools
from typing import Any, NamedTuple

import jaxlib.version

from jaxlm.core.devices import cuda_capability, processor_facts

AUTO = "auto"
_FAST, _SLOW = "p=f32,c=bfloat16", "f32"  # the policies of `trainer.mp` that `auto` chooses from
_FIRST_WITH_TENSOR_CORES = (8, 0)  # Ampere
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")  # the fastest first
# Earlier versions compute most products of bfloat16 in float32 on CPUs, as `jaxlm bench` shows (`hardware/cpu_products.py`).
_FIRST_JAXLIB = (0, 12)


class Bfloat16(NamedTuple):
    """Attributes: is_fast: whether products are faster than in float32; reason: why."""

    is_fast: bool
    reason: str

    @property
    def policy(self) -> str:
        """What `trainer.mp: auto` stands for."""
        return _FAST if self.is_fast else _SLOW


def bfloat16_products(device: Any) -> Bfloat16:
    """What a device does with bfloat16."""
    if device.platform == "cpu":
        return _of_processor(_instructions(), jaxlib.version.__version_info__)
    capability = cuda_capability(device)
    if capability is not None and capability < _FIRST_WITH_TENSOR_CORES:
        return Bfloat16(False, f"{device.device_kind} has no matrix units for bfloat16")
    return Bfloat16(True, f"{device.device_kind} has matrix units for bfloat16")


def has_matrix_instruction() -> bool:
    """Whether this machine's processor has the matrix instructions for bfloat16."""
    return not _instructions().isdisjoint(_INSTRUCTIONS)


def _of_processor(instructions: frozenset[str], version: tuple[int, ...]) -> Bfloat16:
    used, first = ".".join(map(str, version)), ".".join(map(str, _FIRST_JAXLIB))
    instruction = next((name for name in _INSTRUCTIONS if name in instructions), None)
    if instruction is None:
        return Bfloat16(False, f"the processor has neither {' nor '.join(_INSTRUCTIONS)}")
    if version[:2] < _FIRST_JAXLIB:
        return Bfloat16(
            False,
            f"the processor has {instruction}, but jaxlib {used} computes most products of bfloat16 in float32. jaxlib"
            f" {first} and later use it",
        )
    return Bfloat16(True, f"the processor has {instruction}, and jaxlib {used} uses it")


@functools.cache
def _instructions() -> frozenset[str]:
    """What Linux says that the processor has; empty elsewhere."""
    return frozenset(processor_facts().get("flags", "").split())
