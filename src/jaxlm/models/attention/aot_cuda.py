"""Compiling attention for an NVIDIA card that is not here.

Fused kernels cannot be tried on it, so they are taken to be right; and jax asks the card that it finds here what it can do,
so it is told what that card would answer.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from types import ModuleType

_compiling: contextvars.ContextVar[bool] = contextvars.ContextVar("jaxlm_absent_card", default=False)


def is_compiling_for_cuda() -> bool:
    """Whether this is traced for a card that is not here."""
    return _compiling.get()


@contextlib.contextmanager
def compiling_for_cuda(capability: tuple[int, int]) -> Iterator[None]:
    """What is traced inside is for a card of this compute capability that is not here."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def parsed(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    answers = {
        "check_compute_capability": lambda least: capability >= parsed(least),
        "is_cuda_compute_capability_equal": lambda other: capability == parsed(other),
    }
    asked = {name: getattr(fused, name) for name in answers}
    token = _compiling.set(True)
    _set(fused, answers)
    try:
        yield
    finally:
        _set(fused, asked)
        _compiling.reset(token)


def _set(module: ModuleType, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        setattr(module, name, value)
