"""The preconditioner of matrices against the closed form, and with zero gradients."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxlm.optim.kron import initial_factor, precondition
from tests.engine.helpers import layout

ROWS, COLUMNS = hax.make_axes(rows=6, columns=4)


@pytest.mark.parametrize("max_dense_size", [8, pytest.param(0, marks=pytest.mark.slow)], ids=["dense", "diagonal"])
def test_converges_to_the_inverse_roots_of_row_and_column_covariances(max_dense_size):
    rng = np.random.default_rng(0)
    spread = [np.diag(np.exp(rng.normal(size=axis.size))) for axis in (ROWS, COLUMNS)]
    if max_dense_size:
        turns = [np.linalg.qr(rng.normal(size=one.shape))[0] for one in spread]
        spread = [turn @ one @ turn.T for turn, one in zip(turns, spread, strict=True)]
    matrices = (
        spread[0] @ rng.normal(size=(3000, 6, 4)) @ spread[1]
    )  # row covariance: spread[0]^2, column covariance: spread[1]^2
    factors = tuple(initial_factor((), (axis,), 1.0, max_dense_size) for axis in (ROWS, COLUMNS))

    def step(factors, matrix):
        white, *fitted = precondition(matrix, *factors, rate=0.02, damping=0.0)
        return tuple(fitted), (white, fitted[0].apply(jnp.eye(6)), fitted[1].apply(jnp.eye(4)))

    _, (white, left, right) = jax.jit(lambda: jax.lax.scan(step, factors, jnp.asarray(matrices, jnp.float32)))()
    for found, one in ((left, spread[0]), (right, spread[1])):
        found = np.asarray(found[1000:], np.float64).mean(0)
        expected = np.linalg.inv(one)
        np.testing.assert_allclose(found / np.trace(found), expected / np.trace(expected), atol=0.02)
    entries = np.asarray(white[1000:], np.float64).reshape(2000, 24)
    np.testing.assert_allclose(entries.T @ entries / 2000, np.eye(24), atol=0.25)


def test_axes_that_do_not_divide_are_not_sharded():
    """A factor's second axis has the size of the parameter's axis, which need not divide over the mesh."""
    spec = lambda size: layout().parameter_sharding((hax.Axis("mlp", size), hax.Axis("embed", size))).spec  # noqa: E731
    assert spec(16) == PartitionSpec(None, "data")
    assert spec(12) == PartitionSpec(None, None)


def test_rows_without_gradients_stay_finite():
    """Zeros cannot be whitened: their factor stops growing once noise of the assumed size would be whitened."""
    factors = tuple(initial_factor((hax.Axis("experts", 2),), (axis,), 1.0, 8) for axis in (ROWS, COLUMNS))
    matrix = jnp.zeros((2, 6, 4)).at[0].set(jnp.asarray(np.random.default_rng(0).normal(size=(6, 4))))
    matrix = matrix.at[0, 2].set(0.0)  # one row of the first matrix, all of the second

    def step(factors, _):
        white, *fitted = precondition(matrix, *factors, rate=0.1, damping=1e-9)
        return tuple(fitted), white

    (left, right), white = jax.jit(lambda: jax.lax.scan(step, factors, None, 1000))()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((left.root.array, right.root.array, white)))
    np.testing.assert_array_equal(white[-1][1], 0.0)
    assert np.asarray(left.root.array).max() > 1e2
