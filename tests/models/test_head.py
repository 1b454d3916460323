"""The gradient of the head, and the next-token loss with a head in fp8, against closed forms in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.products.fp8 import E4M3, E5M2, Fp8
from jaxlm.core.tracing import BlockSizes, tracing
from jaxlm.models.head_products import head_gradient
from tests.core.test_fp8 import RECIPES, every_recipe, stands_for
from tests.models.test_loss import problem, value_and_grads
from tests.tiers import one_of

Z = 1e-2
OPTIONS = {"z_loss_weight": Z, "label_smoothing": 0.1, "soft_cap": 2.0, "chunk_tokens": 16}
BOUND = 1 + 2 * Z * 1000  # of a gradient's absolute value


def by_definition(x, w, y, m, fp8: Fp8):
    """The objective and its gradients: with all logits at once, and the scale of the gradient that the loss chose."""
    logits = 2.0 * np.tanh(stands_for(x, (2,), E4M3, fp8) @ stands_for(w, (1,), E4M3, fp8).T / 2.0)
    lse = np.log(np.exp(logits).sum(-1))
    wanted = 0.9 * np.eye(w.shape[0])[y] + 0.1 / w.shape[0]
    total = (m * ((wanted * (lse[..., None] - logits)).sum(-1) + Z * lse**2)).sum()
    gradient = m[..., None] * ((1 + 2 * Z * lse)[..., None] * np.exp(logits - lse[..., None]) - wanted)
    gradient = np.float32(gradient * (1 - (logits / 2.0) ** 2))
    if fp8.recipe == "rowwise":
        d_x = stands_for(gradient, (2,), E4M3, fp8) @ stands_for(w, (0,), E4M3, fp8)
        return total, d_x, np.einsum("bsv,bsd->vd", gradient.astype(np.float64), x)
    scale = np.float32(57344 / BOUND)
    gradient = (gradient * scale).astype(E5M2).astype(np.float64) / scale
    x, w = (stands_for(a, (), E4M3, fp8) for a in (x, w))
    return total, gradient @ w, np.einsum("bsv,bsd->vd", gradient, x)


def in_fp8(x, w, y, m, fp8: Fp8):
    with tracing(quantized_products=True):
        sums, grads = value_and_grads(x, w, y, m, fp8=fp8, **OPTIONS)
    return float(sums.total), *map(np.asarray, grads)


@every_recipe
def test_sums_and_gradients_are_those_of_the_quantized_arrays(fp8):
    given = problem(2, 19, 32, 48)
    given[0][0] *= 30
    for found, expected in zip(in_fp8(*given, fp8), by_definition(*given, fp8), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@every_recipe
def test_a_head_in_fp8_has_the_gradient_of_the_loss(fp8):
    given = problem(2, 19, 32, 48)
    plain, plain_grads = value_and_grads(*given, **OPTIONS)
    total, *grads = in_fp8(*given, fp8)
    assert 1e-7 < abs(total / float(plain.total) - 1) < 0.01
    for found, exact in zip(grads, plain_grads, strict=True):
        assert 1e-3 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.1


@pytest.mark.slow
@every_recipe
@pytest.mark.parametrize("model", one_of([2, 1, 8]))
def test_eight_devices_have_the_scales_of_one(fp8, model):
    given = problem(8, 16, 32, 48)
    given[0][3] *= 30  # one device has the largest hidden states
    expected = in_fp8(*given, fp8)
    shape = mesh_shape(len(jax.devices()), model=model)
    with make_layout(shape, AxisMappings("batch", ("embed",), ("vocab",), {}, {}), {"embed": 32, "vocab": 48}).use():
        found = in_fp8(*given, fp8)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6 * np.abs(b).max())


@pytest.mark.parametrize("num_tokens", [6, 7])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_the_head_is_the_same_in_parts(dtype, num_tokens):
    """An odd number of tokens is one part. In bfloat16, the products are exact in float32, so only the sums round."""
    rng = np.random.default_rng(0)
    d_logits, x = (jnp.asarray(rng.normal(size=(num_tokens, size)), dtype) for size in (11, 5))
    exact = np.asarray(d_logits, np.float64).T @ np.asarray(x, np.float64)
    for parts in (None, 1, 2):
        with tracing(block_sizes=BlockSizes(head_gradient_parts=parts)):
            program = jax.jit(lambda d_logits, x: head_gradient(d_logits, x))
            found = program(d_logits, x)
            text = str(program.trace(d_logits, x).jaxpr)
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
        assert found.dtype == jnp.float32
        is_divided = num_tokens == 6 and (parts or (2 if dtype == jnp.bfloat16 else 1)) == 2
        assert ("[2,3,11]" in text) == is_divided


@pytest.mark.slow
def test_evaluations_read_the_plain_head():
    given = problem(2, 19, 32, 48)
    for fp8 in RECIPES:
        with_fp8, plain = (value_and_grads(*given, **OPTIONS, **more) for more in ({"fp8": fp8}, {}))
        np.testing.assert_array_equal(with_fp8[0].total, plain[0].total)
