"""Gradients that are sums over all tokens, in reduced precision, compared with sums in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haliax import Axis, NamedArray

from jaxlm.core.products.float32_sums import rows_of, scaled, shifted
from jaxlm.models.linear import Linear, MatrixLinear

VOCAB, WIDTH, TOKENS = 7, 4, 4096
AXES = (Axis("vocab", VOCAB), Axis("embed", WIDTH))


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    """Token 0 is three quarters of the text."""
    others = np.random.default_rng(0).integers(0, VOCAB - 1, TOKENS)  # the last one never occurs
    return np.where(np.arange(TOKENS) % 4 == 0, others, 0)


def gradient(ids: np.ndarray, d_rows: np.ndarray, dtype) -> np.ndarray:
    """Of sum(rows * d_rows) with respect to the table, in the dtype of the table."""
    ids, d_rows = NamedArray(jnp.asarray(ids), (Axis("token", TOKENS),)), jnp.asarray(d_rows, dtype)

    def total(table: jax.Array) -> jax.Array:
        rows = rows_of(NamedArray(table, AXES), "vocab", ids)
        assert rows.dtype == dtype
        assert [axis.name for axis in rows.axes] == ["token", "embed"]
        return jnp.sum((rows.array * d_rows).astype(jnp.float32))

    result = jax.jit(jax.grad(total))(jnp.zeros((VOCAB, WIDTH), dtype))
    assert result.dtype == dtype
    return np.asarray(result, np.float64)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_the_gradient_of_a_frequent_token_is_rounded_once(ids, dtype):
    d_rows = np.random.default_rng(1).uniform(0.5, 1.0, (TOKENS, WIDTH)).astype(dtype)
    expected = np.zeros((VOCAB, WIDTH))
    np.add.at(expected, ids, d_rows.astype(np.float64))
    found = gradient(ids, d_rows, dtype)
    np.testing.assert_allclose(found, expected, rtol=ml_dtypes.finfo(dtype).eps)
    assert (found[-1] == 0).all()


def test_in_float32_it_is_the_gradient_of_taking_rows(ids):
    d_rows = np.random.default_rng(1).normal(size=(TOKENS, WIDTH)).astype(np.float32)
    taken = lambda table: jnp.sum(jnp.take(table, jnp.asarray(ids), axis=0) * d_rows)  # noqa: E731
    expected = jax.jit(jax.grad(taken))(jnp.zeros((VOCAB, WIDTH)))
    np.testing.assert_array_equal(gradient(ids, d_rows, np.float32), expected)


X = (Axis("token", TOKENS), Axis("embed", WIDTH))


def terms(seed: int, dtype) -> np.ndarray:
    """[TOKENS, WIDTH], all of one sign: sums in the dtype of the terms would stop growing."""
    return np.random.default_rng(seed).uniform(0.5, 1.0, (TOKENS, WIDTH)).astype(dtype)


def summed(function, x: np.ndarray, d_out: np.ndarray, start: NamedArray) -> np.ndarray:
    """The gradient of sum(function(x, p) * d_out) with respect to p."""

    def total(p: NamedArray, x: jax.Array, d_out: jax.Array) -> jax.Array:
        out = function(NamedArray(x, X), p)
        assert out.dtype == x.dtype
        return jnp.sum((out.rearrange(X).array * d_out).astype(jnp.float32))

    return np.asarray(jax.jit(jax.grad(total))(start, jnp.asarray(x), jnp.asarray(d_out)).array, np.float64)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_the_gradients_of_factors_and_biases_are_rounded_once(dtype):
    x, d_out = terms(2, dtype), terms(3, dtype)
    eps = max(ml_dtypes.finfo(dtype).eps, 1e-5)
    factor, bias = NamedArray(jnp.ones((), dtype), ()), NamedArray(jnp.zeros(WIDTH, dtype), X[1:])
    exact = (x.astype(np.float64) * d_out.astype(np.float64)).sum()
    np.testing.assert_allclose(summed(scaled, x, d_out, factor), exact, rtol=eps)
    exact = d_out.astype(np.float64).sum(0)
    np.testing.assert_allclose(summed(shifted, x, d_out, bias), exact, rtol=eps)


def test_a_factor_and_a_bias_are_applied_in_the_dtype_of_the_input():
    x, dtype = terms(2, ml_dtypes.bfloat16), jnp.bfloat16
    factor, bias = NamedArray(jnp.asarray(0.3, dtype), ()), NamedArray(jnp.full(WIDTH, 0.3, dtype), X[1:])
    named = NamedArray(jnp.asarray(x), X)
    np.testing.assert_array_equal(scaled(named, factor).array, named.array * factor.array)
    np.testing.assert_array_equal(shifted(named, bias).array, named.array + bias.array)
    d_out = terms(3, ml_dtypes.bfloat16)
    d_x = jax.grad(lambda x: jnp.sum((scaled(NamedArray(x, X), factor).array * d_out).astype(jnp.float32)))(named.array)
    np.testing.assert_array_equal(d_x, d_out * np.asarray(factor.array))


@pytest.mark.parametrize("kind", ["linear", "matrix"])
def test_the_bias_of_a_linear_layer_has_the_sum_over_all_tokens(kind):
    linear = Linear.init(Axis("embed", WIDTH), Axis("out", WIDTH), std=1.0, key=jax.random.key(0), use_bias=True)
    layer = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16), linear if kind == "linear" else MatrixLinear.of(linear)
    )
    x, d_out = terms(2, ml_dtypes.bfloat16), terms(3, ml_dtypes.bfloat16)

    def total(layer, x, d_out):
        return jnp.sum((layer(NamedArray(x, X)).rearrange(("token", "out")).array * d_out).astype(jnp.float32))

    gradient = jax.jit(jax.grad(total))(layer, jnp.asarray(x), jnp.asarray(d_out))
    exact = d_out.astype(np.float64).sum(0)
    np.testing.assert_allclose(gradient.bias.array.astype(jnp.float32), exact, rtol=2.0**-7)
