"""Fused attention that is saved, in programs for GPUs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from jaxlm.models.attention.backends.cudnn import cudnn_attention
from jaxlm.models.attention.backends.splash import splash_attention
from jaxlm.models.remat import remat
from jaxlm.systems.forecast.aot import compiling_for_cuda


def executions(jaxpr, primitive):
    """How often a program calls an operation, each branch of a conditional included. Loops count once."""
    total = 0
    for equation in jaxpr.eqns:
        if not equation.outvars and not equation.effects:  # the compiler drops a call that returns nothing
            continue
        total += primitive in equation.primitive.name
        total += sum(executions(inner, primitive) for inner in jaxprs_in_params(equation.params))
    return total


SPLASH = functools.partial(splash_attention, scale=0.1, window=None, interpret=True)
CUDNN = functools.partial(cudnn_attention, scale=0.1, window=None, packed=False)


@pytest.mark.parametrize(
    ("kernel", "primitive", "calls"),
    [(SPLASH, "pallas_call", {"attention": 3, "full": 4}), (CUDNN, "attention_fwd", {"attention": 1, "full": 2})],
    ids=["splash", "cudnn"],
)
def test_a_fused_kernel_runs_its_forward_pass_once_with_saved_attention(kernel, primitive, calls, monkeypatch):
    """Splash has one kernel for the forward pass and two for the backward pass."""

    def layer(x, w):
        projected = (x @ w).reshape(1, 128, 2, 1, 64)
        out = kernel(projected, projected[:, :, :, 0], projected[:, :, :, 0], jnp.ones((1, 128), jnp.int32))
        return x + out.reshape(x.shape), None

    def loss(policy, weights, x):
        return jax.lax.scan(remat(policy, layer, scan=True), x, weights)[0].astype(jnp.float32).sum()

    x = jnp.zeros((1, 128, 128), jnp.bfloat16)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91400)
    with compiling_for_cuda((9, 0)):
        for policy, expected in calls.items():
            gradient = jax.grad(functools.partial(loss, policy))
            jaxpr = jax.make_jaxpr(gradient)(jnp.zeros((2, 128, 128), x.dtype), x)
            assert executions(jaxpr.jaxpr, primitive) == expected
