"""Activation functions, keeping their input and nothing else for the backward pass.

Left to automatic differentiation, an activation keeps every step of its formula: five arrays for the tanh form of GELU, each
as large as the widest of a layer. On an accelerator that is memory, and time to write and read it; the derivative written
down here makes them again from the input.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxlm.core.derivatives import OwnBackward

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


@functools.partial(OwnBackward, nondiff_argnums=(0,))
def _activated(name: str, x: jax.Array) -> Any:
    return ACTIVATIONS[name](x)


@functools.partial(OwnBackward, nondiff_argnums=(0,))
def _gated(name: str, gate: jax.Array, up: jax.Array) -> Any:
    return ACTIVATIONS[name](gate) * up


def _activated_forward(name: str, x: jax.Array):
    return ACTIVATIONS[name](x), x


def _activated_backward(name: str, x: jax.Array, d_out: jax.Array):
    return jax.vjp(ACTIVATIONS[name], x)[1](d_out)


def _gated_forward(name: str, gate: jax.Array, up: jax.Array):
    return ACTIVATIONS[name](gate) * up, (gate, up)


def _gated_backward(name: str, kept: tuple[jax.Array, jax.Array], d_out: jax.Array):
    return jax.vjp(lambda gate, up: ACTIVATIONS[name](gate) * up, *kept)[1](d_out)


_activated.defvjp(_activated_forward, _activated_backward)
_gated.defvjp(_gated_forward, _gated_backward)
