"""Batches: arrays that begin with {microbatch, batch}. Each process reads only the rows that its devices hold."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import haliax as hax
import jax
import numpy as np

from jaxlm.core.axes import POSITION
from jaxlm.core.sharding import Layout
from jaxlm.data.row_order import row_orders
from jaxlm.models.inference.sampling import Sampling

Columns = dict[str, np.ndarray]
B = TypeVar("B")
_SEGMENT_IDS, _ORDER = "segment_ids", "order"


@dataclass(frozen=True)
class Column:
    """One array of a batch.

    Attributes:
        dtype: its dtype.
        axes: axes of one example, without {microbatch, batch}.
    """

    dtype: Any
    axes: tuple[hax.Axis, ...]


@dataclass(frozen=True)
class SampledRows:
    """Describes what the devices that train sample before they train on it.

    Attributes:
        group_size: responses to each example.
        num_batches: number of batches whose examples are sampled together.
        num_steps: number of steps that train on them.
        prompt_tokens, new_tokens: the most tokens of a prompt and of a response.
        rows_at_once: number of responses -> how many of them are sampled at the same time.
        sampling: what tokens are drawn from.
    """

    group_size: int
    num_batches: int
    num_steps: int
    prompt_tokens: int
    new_tokens: int
    rows_at_once: Callable[[int], int]
    sampling: Sampling

    def num_rows(self, batch_size: int) -> int:
        """Number of responses that are sampled together, for batches of this size."""
        return self.group_size * self.num_batches * batch_size


@dataclass(frozen=True)
class BatchSpec(Generic[B]):
    """The shapes of one kind of batch.

    On a layout that balances the work of a row's shards, tokens are not in the order of the text. Then a batch has a column
    `order` beside each column of segments (`mismatched_order` beside `mismatched_segment_ids`), and all columns with the
    same prefix are in this order.

    Attributes:
        make: the batch's class, whose fields are the columns.
        columns: column by name, without `order`.
        sampled: what the devices sample before they train on it; None if they sample nothing.
    """

    make: Callable[..., B]
    columns: Mapping[str, Column]
    sampled: SampledRows | None = None

    def abstract(self, leading: Sequence[hax.Axis], layout: Layout) -> B:
        """Shapes, dtypes and shardings of a batch. Args: leading: {[microbatch,] batch}."""

        def abstract_column(column: Column) -> hax.NamedArray:
            shape, sharding, axes = _placement(leading, column, layout)
            return hax.NamedArray(jax.ShapeDtypeStruct(shape, column.dtype, sharding=sharding), axes)  # type: ignore[arg-type]

        columns = {**self.columns, **self._orders(layout)}
        return self.make(**{name: abstract_column(column) for name, column in columns.items()})

    def assemble(self, read: Callable[[np.ndarray], Columns], leading: Sequence[hax.Axis], layout: Layout) -> B:
        """Reads each row of this process's shards once, and assembles the global batch.

        Args:
            read: rows (int64, numbered in the order of the leading axes) -> their columns, [rows, ...] each.
            leading: {[microbatch,] batch}.
        """
        orders = self._orders(layout)
        columns = {**self.columns, **orders}
        sizes = tuple(axis.size for axis in leading)
        numbers = np.arange(int(np.prod(sizes))).reshape(sizes)
        shards = [
            index[: len(sizes)]
            for shape, sharding, _ in (_placement(leading, column, layout) for column in columns.values())
            for index in sharding.addressable_devices_indices_map(shape).values()
            if index is not None
        ]
        local_rows = np.unique(np.concatenate([numbers[shard].ravel() for shard in shards]))
        values = read(local_rows)
        if orders:
            values = self._ordered(values, orders, layout)

        def place(name: str, column: Column) -> hax.NamedArray:
            shape, sharding, axes = _placement(leading, column, layout)

            def shard_data(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None, "every addressable shard has an index"
                rows = numbers[index[: len(sizes)]]
                shard = values[name][np.searchsorted(local_rows, rows.ravel())]
                return shard.reshape(*rows.shape, *shard.shape[1:])[(..., *index[len(sizes) :])]

            return hax.NamedArray(jax.make_array_from_callback(shape, sharding, shard_data), axes)

        return self.make(**{name: place(name, column) for name, column in columns.items()})

    @property
    def takes_order(self) -> bool:
        """Tells whether batches can have tokens in another order: they have segments, and columns for the order."""
        orders = self._order_columns()
        try:
            self.make(**dict.fromkeys((*self.columns, *orders)))
        except TypeError:
            return False
        return bool(orders)

    def _orders(self, layout: Layout) -> dict[str, Column]:
        """The columns with the order of tokens on a layout."""
        return {} if layout.context.balance == "none" else self._order_columns()

    def _order_columns(self) -> dict[str, Column]:
        segments = {name: column for name, column in self.columns.items() if name.endswith(_SEGMENT_IDS)}
        return {name.removesuffix(_SEGMENT_IDS) + _ORDER: column for name, column in segments.items()}

    def _ordered(self, values: Columns, orders: Mapping[str, Column], layout: Layout) -> Columns:
        """The columns of some rows in the order that the layout asks for, and this order."""
        context, ordered = layout.context, dict(values)
        for name in orders:
            segment_ids = values[name.removesuffix(_ORDER) + _SEGMENT_IDS]
            ordered[name] = row_orders(context.balance, segment_ids, layout.num_row_shards, context.work)
        for name, column in self.columns.items():
            if POSITION in [axis.name for axis in column.axes]:
                prefixes = [one.removesuffix(_ORDER) for one in orders if name.startswith(one.removesuffix(_ORDER))]
                order = max(prefixes, key=len) + _ORDER
                ordered[name] = _taken(values[name], column, ordered[order], orders[order])
        return ordered


def _taken(values: np.ndarray, column: Column, indices: np.ndarray, order: Column) -> np.ndarray:
    """The values of each row at some indices of its positions. Args: values, indices: [rows, ...], axes as in the columns."""
    names = [axis.name for axis in column.axes]
    places = [1 + names.index(axis.name) for axis in order.axes]
    targets = range(1, 1 + len(places))
    moved = np.moveaxis(values, places, targets)
    flat, length = moved.reshape(-1, *moved.shape[len(places) :]), indices.shape[-1]
    taken = np.stack([one[index] for one, index in zip(flat, indices.reshape(-1, length), strict=True)])
    return np.moveaxis(taken.reshape(moved.shape), targets, places)


def _placement(
    leading: Sequence[hax.Axis], column: Column, layout: Layout
) -> tuple[tuple[int, ...], jax.sharding.NamedSharding, tuple[hax.Axis, ...]]:
    axes = (*leading, *column.axes)
    return tuple(axis.size for axis in axes), layout.compute_sharding(axes), axes


def token_columns(*axes: hax.Axis) -> dict[str, Column]:
    """The columns of token sequences: those of `TokenBatch`. Args: axes: of one example, the position axis last."""
    ids = Column(np.int32, axes)
    names = ("tokens", "targets", "loss_mask", "segment_ids", "positions")
    return {name: Column(np.float32, axes) if name == "loss_mask" else ids for name in names}


def random_tokens(shape: tuple[int, ...], vocab_size: int, seed: int) -> Columns:
    """Columns of random tokens, one document per row: [*shape] each."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (*shape[:-1], shape[-1] + 1), np.int32)
    everywhere = np.ones(tokens.shape, bool)
    return shifted_columns(tokens, everywhere, everywhere)


def shifted_columns(
    ids: np.ndarray, inside: np.ndarray, is_target: np.ndarray, begins: np.ndarray | None = None
) -> Columns:
    """The columns of `TokenBatch`.

    Args:
        ids: int32 [..., seq_len + 1], the tokens; 0 where none is.
        inside: bool, likewise: where a token is.
        is_target: likewise: which of them are targets.
        begins: likewise: where a document begins, in each row at the first token; None for one document per row.
    """
    is_input = inside[..., :-1]
    segment_ids, positions = is_input.astype(np.int32), np.arange(is_input.shape[-1], dtype=np.int32)
    if begins is not None:
        is_first = begins[..., :-1]
        segment_ids = is_first.cumsum(axis=-1, dtype=np.int32) * is_input
        positions = positions - np.maximum.accumulate(np.where(is_first, positions, 0), axis=-1)
    return {
        "tokens": ids[..., :-1].copy(),
        "targets": ids[..., 1:].copy(),
        "loss_mask": is_target[..., 1:].astype(np.float32),
        "segment_ids": segment_ids,
        "positions": positions * is_input,
    }
