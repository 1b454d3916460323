"""Windows into batches on the devices: read ahead in the background, each process only its own rows."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import numpy as np

from jaxlm.core.axes import BATCH, MICROBATCH, POSITION
from jaxlm.core.sharding import Layout
from jaxlm.core.types import TokenBatch
from jaxlm.data.base import Batches
from jaxlm.data.mixture import Columns, Mixture
from jaxlm.data.packing import Windows
from jaxlm.data.prefetch import Prefetch

_PREFETCHED = 2
_COLUMNS = ("tokens", "targets", "loss_mask", "segment_ids", "positions")


def train_batches(mixture: Mixture, *, batch_size: int, num_microbatches: int, layout: Layout) -> "WindowBatches":
    """Batches {microbatch, batch, position} of a mixture's examples.

    Where `batch_size` examples do not fill micro-batches that divide over the devices, padding without weight does.
    """
    ways = layout.ways(BATCH)
    axes = (
        hax.Axis(MICROBATCH, num_microbatches),
        hax.Axis(BATCH, -(-batch_size // (num_microbatches * ways)) * ways),
        hax.Axis(POSITION, mixture.seq_len),
    )
    return WindowBatches(_Order(mixture, axes, layout, batch_size), batch_size)


@dataclass(frozen=True)
class _Order:
    """Example after example, on devices.

    Attributes:
        axes: (microbatch, batch, position); row m x batch + j of a step is row j of micro-batch m.
        batch_size: examples a step; rows beyond them are padding.
    """

    mixture: Mixture
    axes: tuple[hax.Axis, ...]
    layout: Layout
    batch_size: int

    def batch(self, first: int) -> TokenBatch:
        """The batch that begins with example `first`."""

        def read(rows: np.ndarray) -> Columns:
            return _blanked(self.mixture.read(first + rows), rows >= self.batch_size)

        return _on_devices(read, self.axes, self.layout)


class WindowBatches(Batches):
    """Row r of batch b is example b x batch_size + r of a mixture."""

    def __init__(self, order: _Order, batch_size: int):
        self._order = order
        self._batch_size = batch_size
        self._consumed = 0
        self._ahead: Prefetch[TokenBatch] | None = None

    def __next__(self) -> TokenBatch:
        if self._ahead is None:
            # Made of plain values and not of `self`, which the thread must not keep alive.
            make = functools.partial(_nth_batch, self._order, self._consumed, self._batch_size)
            self._ahead = Prefetch(make, depth=_PREFETCHED)
        batch = self._ahead.take()
        self._consumed += self._batch_size
        return batch

    def state(self) -> dict[str, Any]:
        """{"examples": examples consumed}."""
        return {"examples": self._consumed}

    def restore(self, state: dict[str, Any]) -> None:
        """See `Batches.restore`. The batch size may be another than before."""
        self.close()
        self._consumed = int(state["examples"])

    def close(self) -> None:
        """Stops reading ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def _nth_batch(order: _Order, start: int, batch_size: int, number: int) -> TokenBatch:
    return order.batch(start + number * batch_size)


def eval_batches(windows: Windows, *, batch_size: int, layout: Layout, max_batches: int | None) -> Iterator[TokenBatch]:
    """One pass in order, as batches {batch, position}; rows beyond the end are padding with no weight."""
    axes = (hax.Axis(BATCH, batch_size), hax.Axis(POSITION, windows.seq_len))
    num_batches = -(-len(windows) // batch_size)
    for number in range(num_batches if max_batches is None else min(num_batches, max_batches)):
        yield _on_devices(lambda rows, first=number * batch_size: _padded(windows, first + rows), axes, layout)


def _padded(windows: Windows, indices: np.ndarray) -> Columns:
    return _blanked(windows.read(np.minimum(indices, len(windows) - 1)), indices >= len(windows))


def _blanked(columns: Columns, beyond: np.ndarray) -> Columns:
    """The same with zeros in some rows: padding that counts nothing."""
    if beyond.any():
        for column in columns.values():
            column[beyond] = 0
    return columns


def _on_devices(read: Callable[[np.ndarray], Columns], axes: tuple[hax.Axis, ...], layout: Layout) -> TokenBatch:
    """Reads this process's rows, each once, and puts every device's part on it."""
    place = layout.compute_sharding(axes)
    shape = tuple(axis.size for axis in axes)
    numbers = np.arange(int(np.prod(shape[:-1]))).reshape(shape[:-1])
    parts = [index for index in place.addressable_devices_indices_map(shape).values() if index is not None]
    mine = np.unique(np.concatenate([numbers[part[:-1]].ravel() for part in parts]))
    columns = read(mine)

    def column(name: str) -> hax.NamedArray:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "every shard of a batch has a place in it"
            rows = numbers[index[:-1]]
            found = columns[name][np.searchsorted(mine, rows.ravel())]
            return found.reshape(*rows.shape, shape[-1])[..., index[-1]]

        return hax.NamedArray(jax.make_array_from_callback(shape, place, part), axes)

    return TokenBatch(**{name: column(name) for name in _COLUMNS})
