"""Activation functions, keeping their input and nothing else for the backward pass.

Left to automatic differentiation, an activation keeps every step of its formula: five arrays for the tanh form of GELU, each
as large as the widest of a layer. On an accelerator that is memory, and time to write and read it; the derivative written
down here makes them again from the input.
"""

import functools
from collections.abc import Callable

import jax

from jaxlm.core.custom_vjp import CustomVjp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
}
"""By the names that Hugging Face configurations use."""


def activated(name: str, x: jax.Array) -> jax.Array:
    """The activation of each entry."""
    return _activated(name, x)


def gated(name: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The activation of each entry of `gate` times that of `up`, of the same shape; both are kept for the backward pass.

    Source: Shazeer 2020 (arXiv:2002.05202), equation 6: SwiGLU with silu.
    """
    return _gated(name, gate, up)


def _keeping_what_it_is_given(definition: Callable[..., jax.Array]) -> CustomVjp:
    """A kernel of (name, *arrays) whose backward pass differentiates the definition at the arrays, which alone are kept."""
    kernel = CustomVjp(definition, nondiff_argnums=(0,))
    kernel.defvjp(
        lambda name, *given: (definition(name, *given), given),
        lambda name, given, d_out: jax.vjp(functools.partial(definition, name), *given)[1](d_out),
    )
    return kernel


@_keeping_what_it_is_given
def _activated(name: str, x: jax.Array) -> jax.Array:
    return ACTIVATIONS[name](x)


@_keeping_what_it_is_given
def _gated(name: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    return ACTIVATIONS[name](gate) * up
