"""What tracing a model depends on, besides its arguments and the layout: one value. And what it turns off.

A kernel with a custom backward pass (`jax.custom_vjp`) is faster and stores fewer residuals than autodiff of its
definition, but it can be differentiated only once: inside a loop or remat, jax cannot differentiate the backward pass. To
take second derivatives, trace the kernels as their plain definitions: `tracing(twice_differentiable=True)`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr


@dataclass(frozen=True)
class BlockSizes:
    """The blocks in which kernels compute. They change only the order of sums. None: the kernel's own default.

    Attributes:
        loss_chunk_tokens: tokens per chunk of the loss on one device (`jaxlm.models.chunked_loss`).
        attention_block: queries per block of blockwise attention; more in long sequences
            (`jaxlm.models.attention.backends.blockwise`).
        head_gradient_parts: parts of a chunk's tokens that the gradient of the head is a sum over
            (`jaxlm.models.chunked_loss`).
    """

    loss_chunk_tokens: int | None = None
    attention_block: int | None = None
    head_gradient_parts: int | None = None


@dataclass(frozen=True)
class TraceOptions:
    """Holds what the tracing of a program depends on.

    Attributes:
        auto_remat: the remat policy that `auto` stands for (`jaxlm.models.remat`).
        twice_differentiable: kernels with a custom backward pass are replaced by their plain definitions, which can be
            differentiated more than once. Values and first derivatives are the same up to floating-point rounding; run
            time and memory use differ.
        quantized_products: layers whose products are quantized in training (`jaxlm.core.products.fp8.Fp8`) quantize them. The
            training step sets this; evaluations and generation multiply in the dtype of the weight.
        assume_kernels: fused attention kernels are assumed to be correct, because the GPU that the program is compiled
            for is not attached and cannot self-test them.
    """

    auto_remat: str = "cheap"
    twice_differentiable: bool = False
    quantized_products: bool = False
    assume_kernels: bool = False
    block_sizes: BlockSizes = BlockSizes()


# A jax user context rather than a context variable: it is part of the keys of jax's tracing caches. Otherwise a function
# that was traced once would not be traced again with other options.
_current = jax.make_user_context(TraceOptions())


def trace_options() -> TraceOptions:
    """The options of the current trace."""
    return _current.value


@contextlib.contextmanager
def tracing(**changes: Any) -> Iterator[None]:
    """Changes fields of the trace options while tracing inside. They hold in traced functions and nested traces too."""
    with _current(dataclasses.replace(trace_options(), **changes)):
        yield


def used_arguments(function: Callable[..., Any], *args: Any) -> list[bool]:
    """Finds out for each array of the arguments whether the result depends on it. Args: args: shapes and dtypes suffice."""
    traced = jax.make_jaxpr(function)(*args).jaxpr
    return dce_jaxpr(traced, [True] * len(traced.outvars))[1]


class CustomVjp:
    """`jax.custom_vjp`, except where `TraceOptions.twice_differentiable` is set: there it is traced as it is defined.

    Its backward pass is traced with the options of the forward pass. They have usually ended by then: a step sets them for
    the loss, and differentiates it outside.
    """

    def __init__(self, definition: Callable[..., Any], nondiff_argnums: Sequence[int] = ()):
        self._definition = definition
        static = (0, *(1 + number for number in nondiff_argnums))
        self._kernel = jax.custom_vjp(_after_options(definition), nondiff_argnums=static)

    def __call__(self, *args: Any) -> Any:
        options = trace_options()
        return self._definition(*args) if options.twice_differentiable else self._kernel(options, *args)

    def defvjp(
        self, forward: Callable[..., Any], backward: Callable[..., Any], *, symbolic_zeros: bool = False
    ) -> None:
        """Defines the backward pass, as `jax.custom_vjp.defvjp` does."""
        self._kernel.defvjp(_after_options(forward), _after_options(backward), symbolic_zeros=symbolic_zeros)


def _after_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(*args)` as a function of (options, *args), traced with these options."""

    def traced(options: TraceOptions, *args: Any) -> Any:
        with _current(options):
            return function(*args)

    traced.__name__ = function.__name__  # programs name calls by it
    return traced
