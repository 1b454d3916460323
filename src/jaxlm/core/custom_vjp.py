"""How often what is being traced can be differentiated.

A kernel with a backward pass of its own (`jax.custom_vjp`) is faster and keeps less than what automatic differentiation
makes of its definition, and it can be differentiated once: inside of a loop or of recomputation jax has no derivative of
the backward pass. Whoever wants second derivatives traces the kernels as their definitions instead.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

# Not a context variable: jax's caches of traced functions must tell the two apart.
_twice = jax.make_user_context(False)


def twice_differentiable() -> AbstractContextManager[None]:
    """What is traced inside can be differentiated as often as one likes: kernels are their definitions.

    Values and first derivatives are the same, up to the order of float operations; time and memory are not.
    """
    return _twice(True)


def is_twice_differentiable() -> bool:
    """Whether this is traced inside of `twice_differentiable`."""
    return _twice.value


class CustomVjp:
    """`jax.custom_vjp`, but for what is traced inside of `twice_differentiable`: that is the function as it is written."""

    def __init__(self, definition: Callable[..., Any], nondiff_argnums: Sequence[int] = ()):
        self._definition = definition
        self._kernel = jax.custom_vjp(definition, nondiff_argnums=tuple(nondiff_argnums))

    def __call__(self, *args: Any) -> Any:
        return self._definition(*args) if is_twice_differentiable() else self._kernel(*args)

    def defvjp(
        self, forward: Callable[..., Any], backward: Callable[..., Any], *, symbolic_zeros: bool = False
    ) -> None:
        """Says what the backward pass is, as `jax.custom_vjp.defvjp`."""
        self._kernel.defvjp(forward, backward, symbolic_zeros=symbolic_zeros)
