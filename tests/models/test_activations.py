"""Activations against their formulas in float64, and their saved residuals."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.tracing import tracing
from jaxlm.models.activations import ACTIVATIONS, activated, gated

FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_new": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_fast": lambda x: x / 2 * (1 + np.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
    "gelu_accurate": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def slope(formula, x, h=1e-5):
    return (formula(x + h) - formula(x - h)) / (2 * h)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients_match_the_formula(name):
    x, up, d_out = np.random.default_rng(0).normal(size=(3, 5, 8)) * 2
    formula, given = FORMULAS[name], [jnp.asarray(a, jnp.float32) for a in (x, up)]
    out, vjp = jax.vjp(lambda x: activated(name, x), given[0])
    np.testing.assert_allclose(out, formula(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(vjp(jnp.asarray(d_out, jnp.float32))[0], slope(formula, x) * d_out, rtol=1e-4, atol=1e-5)

    out, vjp = jax.vjp(lambda gate, up: gated(name, gate, up), *given)
    np.testing.assert_allclose(out, formula(x) * up, rtol=1e-5, atol=1e-6)
    d_gate, d_up = vjp(jnp.asarray(d_out, jnp.float32))
    np.testing.assert_allclose(d_gate, slope(formula, x) * up * d_out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(d_up, formula(x) * d_out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_saves_only_the_input(name):
    x = jnp.ones((3, 8), jnp.bfloat16)
    for run, given in ((activated, (x,)), (gated, (x, x))):
        _, vjp = jax.vjp(functools.partial(run, name), *given)
        assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(vjp)] == [(x.shape, x.dtype) for x in given]


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new"])
def test_second_derivatives(name):
    x = np.random.default_rng(1).normal(size=(5,)) * 2
    with tracing(twice_differentiable=True):
        along = jax.jvp(
            jax.grad(lambda x: jnp.sum(activated(name, x))), *[(jnp.asarray(a, jnp.float32),) for a in (x, x)]
        )
    curve = (slope(FORMULAS[name], x + 1e-4) - slope(FORMULAS[name], x - 1e-4)) / 2e-4
    np.testing.assert_allclose(along[1], curve * x, rtol=1e-3, atol=1e-4)
