"""Activation functions that save only their inputs for the backward pass.

Under automatic differentiation, an activation saves every step of its formula: five arrays for the tanh form of GELU,
each as large as the widest activation of a layer. That costs memory and bandwidth. The backward passes here recompute
them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxlm.core.tracing import CustomVjp


def _quick_gelu(x: jax.Array) -> jax.Array:
    """Hendrycks & Gimpel 2016 (arXiv:1606.08415), section 2: the sigmoid approximation of GELU."""
    return x * jax.nn.sigmoid(1.702 * x)


def _squared_relu(x: jax.Array) -> jax.Array:
    """So et al. 2021 (arXiv:2109.08668), section 3.2."""
    return jnp.square(jax.nn.relu(x))


_tanh_gelu = functools.partial(jax.nn.gelu, approximate=True)
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_accurate": _tanh_gelu,
    "quick_gelu": _quick_gelu,
    "relu2": _squared_relu,
    "sigmoid": jax.nn.sigmoid,
}
"""Activation functions by their names in Hugging Face configs. `gelu_fast` and `gelu_accurate` are their authors' names for
`gelu_new`."""


def _saving_only_inputs(definition: Callable[..., jax.Array]) -> CustomVjp:
    """A function of (constant, *arrays) that saves only the arrays. Its backward pass differentiates the definition."""
    kernel = CustomVjp(definition, nondiff_argnums=(0,))
    kernel.defvjp(
        lambda name, *inputs: (definition(name, *inputs), inputs),
        lambda name, inputs, d_out: jax.vjp(functools.partial(definition, name), *inputs)[1](d_out),
    )
    return kernel


@_saving_only_inputs
def activated(name: str, x: jax.Array) -> jax.Array:
    """Applies the named activation."""
    return ACTIVATIONS[name](x)


@_saving_only_inputs
def gated(name: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """activation(gate) * up, for arrays of the same shape (Shazeer 2020, arXiv:2002.05202, equation 6)."""
    return ACTIVATIONS[name](gate) * up


@dataclass(frozen=True)
class SwigluClamp:
    """The gated activation of gpt-oss (OpenAI 2025, arXiv:2508.10925, section 2.3).

    Attributes:
        alpha: factor of the gate in the sigmoid.
        limit: the largest gate, and the largest size of what it multiplies.
    """

    alpha: float
    limit: float


@_saving_only_inputs
def clamped(clamp: SwigluClamp, gate: jax.Array, up: jax.Array) -> jax.Array:
    """(up + 1) * gate * sigmoid(alpha * gate), both limited before, for arrays of the same shape."""
    # Not `clip`, which halves the derivative at the limit.
    gate = jnp.where(gate > clamp.limit, clamp.limit, gate)
    up = jnp.where(jnp.abs(up) > clamp.limit, jnp.sign(up) * clamp.limit, up)
    return (up + 1) * gate * jax.nn.sigmoid(clamp.alpha * gate)
