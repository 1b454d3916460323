"""Gradients of embedding tables in reduced precision, compared with sums in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haliax import Axis, NamedArray

from jaxlm.core.products.lookup import rows_of

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
