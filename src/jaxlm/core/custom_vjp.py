"""Custom backward passes that can be turned off where second derivatives are needed.

A kernel with a custom backward pass (`jax.custom_vjp`) is faster and stores fewer residuals than autodiff of its
definition, but it can be differentiated only once: inside a loop or remat, jax cannot differentiate the backward pass. To
take second derivatives, trace the kernels as their plain definitions: `tracing(twice_differentiable=True)`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxlm.core.trace_options import trace_options


class CustomVjp:
    """`jax.custom_vjp`, except where `TraceOptions.twice_differentiable` is set: there it is traced as it is defined."""

    def __init__(self, definition: Callable[..., Any], nondiff_argnums: Sequence[int] = ()):
        self._definition = definition
        self._kernel = jax.custom_vjp(definition, nondiff_argnums=tuple(nondiff_argnums))

    def __call__(self, *args: Any) -> Any:
        return self._definition(*args) if trace_options().twice_differentiable else self._kernel(*args)

    def defvjp(
        self, forward: Callable[..., Any], backward: Callable[..., Any], *, symbolic_zeros: bool = False
    ) -> None:
        """Defines the backward pass, as `jax.custom_vjp.defvjp` does."""
        self._kernel.defvjp(forward, backward, symbolic_zeros=symbolic_zeros)
