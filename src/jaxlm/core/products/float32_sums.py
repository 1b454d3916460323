"""Gradients that are sums over all tokens: of an embedding's rows, of biases and of scalar factors.

In bfloat16, which has 8 bits, a sum stops growing at 256 equal terms, and XLA adds in the dtype of the terms wherever it
likes. So these sums are computed in float32, as torch does for float32 parameters, and rounded once. The forward pass is the
same, and in float32 so is the whole program.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.sharding import summed_rows
from jaxlm.core.tracing import CustomVjp
from jaxlm.core.tree import is_wide


def rows_of(table: NamedArray, axis: str, ids: NamedArray) -> NamedArray:
    """The rows `ids` of a table, {axis, ..} to {.., ..}, in its dtype. With several devices, give that of `for_lookup`."""
    if is_wide(table):
        return table.take(axis, ids)
    return _rows(axis, tuple(table.axes), table.dtype, table, ids)


def shifted(x: NamedArray, bias: NamedArray) -> NamedArray:
    """x + bias, in the dtype of x. Args: bias: has some of the axes of x."""
    if is_wide(x):
        return x + bias
    return (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def scaled(x: NamedArray, factor: NamedArray) -> NamedArray:
    """factor * x. Args: factor: a scalar."""
    if is_wide(x) or is_wide(factor):
        return factor * x
    return NamedArray(_scaled(x.array, factor.array), x.axes)


def _take(axis: str, axes: Sequence[Axis], dtype: Any, table: NamedArray, ids: NamedArray) -> NamedArray:
    return table.take(axis, ids)


def _take_forward(
    axis: str, axes: Sequence[Axis], dtype: Any, table: NamedArray, ids: NamedArray
) -> tuple[NamedArray, NamedArray]:
    return table.take(axis, ids), ids


def _take_backward(
    axis: str, axes: Sequence[Axis], dtype: Any, ids: NamedArray, d_rows: NamedArray
) -> tuple[NamedArray, None]:
    like = NamedArray(jnp.zeros([one.size for one in axes], jnp.float32), tuple(axes))
    (d_table,) = jax.linear_transpose(lambda table: table.take(axis, ids), like)(d_rows.astype(jnp.float32))
    return summed_rows(d_table).astype(dtype), None


def _scale(x: jax.Array, factor: jax.Array) -> jax.Array:
    return x * factor


def _scale_forward(x: jax.Array, factor: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x * factor, (x, factor)


def _scale_backward(saved: tuple[jax.Array, jax.Array], d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, factor = saved
    d_factor = jnp.sum(d_out.astype(jnp.float32) * x.astype(jnp.float32))
    return (d_out * factor).astype(x.dtype), d_factor.astype(factor.dtype)


_rows = CustomVjp(_take, nondiff_argnums=(0, 1, 2))
_rows.defvjp(_take_forward, _take_backward)
_scaled = CustomVjp(_scale)
_scaled.defvjp(_scale_forward, _scale_backward)
