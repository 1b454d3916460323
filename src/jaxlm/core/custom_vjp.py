"""Custom backward passes that can be turned off where second derivatives are needed.

A kernel with a custom backward pass (`jax.custom_vjp`) is faster and stores fewer residuals than autodiff of its
definition, but it can be differentiated only once: inside a loop or remat, jax cannot differentiate the backward pass. To
take second derivatives, trace the kernels as their plain definitions.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

# A jax user context rather than a context variable, because jax's tracing caches must distinguish the two cases.
_twice = jax.make_user_context(False)


def twice_differentiable() -> AbstractContextManager[None]:
    """Inside this context, functions are traced so that they can be differentiated more than once.

    Kernels are replaced by their plain definitions. Values and first derivatives are the same up to floating-point
    rounding; run time and memory use differ.
    """
    return _twice(True)


def is_twice_differentiable() -> bool:
    """Whether the current trace is inside `twice_differentiable`."""
    return _twice.value


class CustomVjp:
    """`jax.custom_vjp`, except inside `twice_differentiable`, where the function is traced as it is defined."""

    def __init__(self, definition: Callable[..., Any], nondiff_argnums: Sequence[int] = ()):
        self._definition = definition
        self._kernel = jax.custom_vjp(definition, nondiff_argnums=tuple(nondiff_argnums))

    def __call__(self, *args: Any) -> Any:
        return self._definition(*args) if is_twice_differentiable() else self._kernel(*args)

    def defvjp(
        self, forward: Callable[..., Any], backward: Callable[..., Any], *, symbolic_zeros: bool = False
    ) -> None:
        """Defines the backward pass, as `jax.custom_vjp.defvjp` does."""
        self._kernel.defvjp(forward, backward, symbolic_zeros=symbolic_zeros)
