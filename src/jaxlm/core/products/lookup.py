"""Rows of an embedding table, whose gradient is summed in float32."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.tracing import CustomVjp


def rows_of(table: NamedArray, axis: str, ids: NamedArray) -> NamedArray:
    """The rows `ids` of a table, {axis, ..} to {.., ..}, in its dtype.

    Each row's gradient is the sum over all places where the row is read. In bfloat16, which has 8 bits, it would stop
    growing at 256 equal terms, and the most frequent tokens of a batch are read more often. So it is summed in float32, as
    torch does for float32 parameters, and rounded once.
    """
    if jnp.finfo(table.dtype).bits >= 32:
        return table.take(axis, ids)
    return _rows(axis, tuple(table.axes), table.dtype, table, ids)


def _taken(axis: str, axes: Sequence[Axis], dtype: Any, table: NamedArray, ids: NamedArray) -> NamedArray:
    return table.take(axis, ids)


def _forward(
    axis: str, axes: Sequence[Axis], dtype: Any, table: NamedArray, ids: NamedArray
) -> tuple[NamedArray, NamedArray]:
    return table.take(axis, ids), ids


def _backward(
    axis: str, axes: Sequence[Axis], dtype: Any, ids: NamedArray, d_rows: NamedArray
) -> tuple[NamedArray, None]:
    like = NamedArray(jnp.zeros([one.size for one in axes], jnp.float32), tuple(axes))
    (d_table,) = jax.linear_transpose(lambda table: table.take(axis, ids), like)(d_rows.astype(jnp.float32))
    return d_table.astype(dtype), None


_rows = CustomVjp(_taken, nondiff_argnums=(0, 1, 2))
_rows.defvjp(_forward, _backward)
