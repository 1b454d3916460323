"""Products of sorted rows with the matrices of their groups by jax's Mosaic kernels for NVIDIA's Hopper.

The kernels (`jax.experimental.pallas.ops.gpu`) multiply only rows of groups and leave others as they find them. Groups are
whole blocks here, so that no block has rows of two groups.

Shapes: P rows, G groups, I input features, O output features.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.devices import cuda_capability
from jaxlm.core.sharding import current_device
from jaxlm.core.tracing import CustomVjp, trace_options
from jaxlm.models.attention.selftest import in_new_thread, selftest_problem

SCOPE = "grouped_product"
"""Forecasts find the kernels by this name."""
LARGEST_BLOCK = 128
_TILE, _MOST_GROUPS, _HOPPER = 64, 64, (9, 0)
_TOLERANCE = 0.02


def mosaic_problem(dtype: Any, shape: Sequence[int], block: int | None) -> str | None:
    """Says why the kernels cannot be used; None if they can. Args: shape: [G, I, O] of the matrices."""
    if cuda_capability(current_device()) != _HOPPER:
        return "it needs an NVIDIA device of compute capability 9.0"
    if trace_options().twice_differentiable:
        return "its backward pass is not differentiable"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it does not support {jnp.dtype(dtype).name}, only bfloat16 and float16"
    num_groups, *features = shape
    if num_groups > _MOST_GROUPS:
        return f"it has code for each expert of a device, of which there are {num_groups}, more than {_MOST_GROUPS}"
    if wrong := [size for size in features if size % _TILE]:
        return f"{wrong[0]} features are not a multiple of {_TILE}"
    if block is not None and block % _TILE:
        return "there are too few rows for each expert"
    return None if trace_options().assume_kernels else _run_selftest(jnp.dtype(dtype), *map(_columns, features))


@functools.partial(CustomVjp, nondiff_argnums=(3, 4, 5))
def mosaic_products(
    x_PI: jax.Array, w_GIO: jax.Array, sizes_G: jax.Array, block: int, any_rest: bool, any_gradient: bool
) -> jax.Array:
    """Multiplies each row by its group's matrix, [P, O].

    Args:
        sizes_G: multiples of `block`.
        any_rest: rows after the last group may be anything; otherwise they are 0.
        any_gradient: the same for the gradient of the rows.
    """
    del any_gradient
    return _rows_products(x_PI, w_GIO, sizes_G, block, any_rest=any_rest)


def _mosaic_forward(x_PI, w_GIO, sizes_G, block, any_rest, any_gradient):
    del any_gradient
    return _rows_products(x_PI, w_GIO, sizes_G, block, any_rest=any_rest), (x_PI, w_GIO, sizes_G)


def _mosaic_backward(block, any_rest, any_gradient, residuals, d_out_PO):
    del any_rest
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    x_PI, w_GIO, sizes_G = residuals
    rows = 2 * _TILE if x_PI.shape[1] % (2 * _TILE) == 0 else _TILE
    tiles = _tiles(rows, _columns(d_out_PO.shape[1]))
    with jax.named_scope(SCOPE):
        d_w_GIO = transposed_ragged_dot(x_PI, d_out_PO, group_sizes=sizes_G, **tiles)
    d_x_PI = _rows_products(d_out_PO, w_GIO, sizes_G, block, transposed=True, any_rest=any_gradient)
    return d_x_PI, d_w_GIO, None


mosaic_products.defvjp(_mosaic_forward, _mosaic_backward)


def _rows_products(
    x_PI: jax.Array,
    w: jax.Array,
    sizes_G: jax.Array,
    block: int,
    *,
    transposed: bool = False,
    any_rest: bool = False,
) -> jax.Array:
    """Args: transposed: w is [G, O, I]."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    columns = _columns(w.shape[1 if transposed else 2])
    rows = 2 * _TILE if block % (2 * _TILE) == 0 and columns <= 2 * _TILE else _TILE
    with jax.named_scope(SCOPE):
        out_PO = ragged_dot(x_PI, w, group_sizes=sizes_G, transpose_rhs=transposed, **_tiles(rows, columns))
    if any_rest:
        return out_PO
    return jnp.where((jnp.arange(len(out_PO)) < jnp.sum(sizes_G))[:, None], out_PO, 0)


def _tiles(rows: int, columns: int) -> dict[str, Any]:
    return {"block_m": rows, "block_n": columns, "block_k": _TILE, "max_concurrent_steps": 4, "grid_block_n": 1}


def _columns(size: int) -> int:
    """Columns of the output that a kernel computes at a time."""
    return next((tile for tile in (2 * _TILE, 3 * _TILE) if size % tile == 0), _TILE)


@functools.cache
def _run_selftest(dtype: Any, *columns: int) -> str | None:
    return in_new_thread(lambda: selftest_problem(lambda: _disagreement(dtype, *columns)))


def _disagreement(dtype: Any, inputs: int, outputs: int) -> str | None:
    """Compares products and gradients with those of single matrices in float32, for groups with and without rows."""
    block, sizes = 2 * _TILE, np.array([2, 0, 1, 3, 0]) * 2 * _TILE
    num_rows, rng = int(sizes.sum()) + block, np.random.default_rng(0)
    shapes = (num_rows, 2 * inputs), (len(sizes), 2 * inputs, 3 * outputs), (num_rows, 3 * outputs)
    x, w, d_out = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    d_out = d_out.at[sizes.sum() :].set(0)

    def exact(x, w):
        ends = np.cumsum(sizes)
        parts = [x[end - size : end] @ matrix for matrix, end, size in zip(w, ends, sizes, strict=True)]
        return jnp.concatenate([*parts, jnp.zeros((block, w.shape[2]))])

    @functools.partial(jax.jit, static_argnums=0)
    def results(products, x, w, d_out):
        out, vjp = jax.vjp(products, x, w)
        return out, *vjp(d_out)

    found = results(lambda x, w: mosaic_products(x, w, jnp.asarray(sizes, jnp.int32), block, False, False), x, w, d_out)
    expected = results(exact, *(a.astype(jnp.float32) for a in (x, w, d_out)))
    names = ("output", "gradient of rows", "gradient of matrices")
    for name, result, reference in zip(names, found, expected, strict=True):
        error = np.sqrt(
            np.mean((np.asarray(result, np.float32) - reference) ** 2) / np.mean(np.asarray(reference) ** 2)
        )
        if not error <= _TOLERANCE:
            return f"{name} differs from single products by {error:.1%}"
    return None
