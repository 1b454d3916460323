"""Ahead-of-time compilation of attention for an NVIDIA GPU that is not attached.

Fused kernels cannot be self-tested there, so they are assumed to be correct. jax queries the compute capability of the
attached GPU, so its query functions are replaced while tracing.
"""

import contextlib
from collections.abc import Iterator, Mapping
from types import ModuleType

from jaxlm.core.tracing import tracing


@contextlib.contextmanager
def compiling_for_cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Traces the code inside for a GPU of this compute capability that is not attached."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def parse(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    replacements = {
        "check_compute_capability": lambda minimum: capability >= parse(minimum),
        "is_cuda_compute_capability_equal": lambda other: capability == parse(other),
    }
    originals = {name: getattr(fused, name) for name in replacements}
    _set_attributes(fused, replacements)
    try:
        with tracing(assume_kernels=True):
            yield
    finally:
        _set_attributes(fused, originals)


def _set_attributes(module: ModuleType, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        setattr(module, name, value)
