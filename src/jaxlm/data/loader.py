"""Windows into batches on the devices: read ahead in the background, each process only its own rows."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import numpy as np

from jaxlm.core.axes import BATCH, MICROBATCH, POSITION
from jaxlm.core.batch_schedule import BatchSchedule, BatchStage
from jaxlm.core.sharding import Layout
from jaxlm.core.types import TokenBatch
from jaxlm.data.base import Batches
from jaxlm.data.mixture import Columns, Mixture
from jaxlm.data.packing import PackedSequences
from jaxlm.data.prefetch import Prefetch

_PREFETCHED = 2
_COLUMNS = ("tokens", "targets", "loss_mask", "segment_ids", "positions")


def train_batches(
    mixture: Mixture, batches: BatchSchedule, layout: Layout, *, first_step: int = 0
) -> "SequenceBatches":
    """Batches {microbatch, batch, position} of a mixture's examples.

    Where a batch's examples do not fill its micro-batches, padding without weight does.

    Args:
        first_step: the schedule's step that the first batch is of.
    """
    return SequenceBatches(_Order(mixture, batches, layout), first_step)


@dataclass(frozen=True)
class _Order:
    """Example after example, on devices.

    Row m x batch + j of a step is row j of micro-batch m; rows beyond its batch size are padding.
    """

    mixture: Mixture
    batches: BatchSchedule
    layout: Layout

    def batch(self, first: int, stage: BatchStage) -> TokenBatch:
        """The batch that begins with example `first`."""
        axes = (
            hax.Axis(MICROBATCH, stage.num_microbatches),
            hax.Axis(BATCH, stage.microbatch),
            hax.Axis(POSITION, self.mixture.seq_len),
        )

        def read(rows: np.ndarray) -> Columns:
            return _blanked(self.mixture.read(first + rows), rows >= stage.size)

        return _on_devices(read, axes, self.layout)


class SequenceBatches(Batches):
    """A step's rows are the examples behind those of all steps before it."""

    def __init__(self, order: _Order, first_step: int):
        self._order = order
        self._step = first_step
        self._consumed = 0
        self._ahead: Prefetch[TokenBatch] | None = None

    def __next__(self) -> TokenBatch:
        if self._ahead is None:
            # Made of plain values and not of `self`, which the thread must not keep alive.
            make = functools.partial(_nth_batch, self._order, self._consumed, self._step)
            self._ahead = Prefetch(make, depth=_PREFETCHED)
        batch = self._ahead.take()
        self._consumed += self._order.batches.at(self._step).size
        self._step += 1
        return batch

    def read_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.refill()

    def state(self) -> dict[str, Any]:
        """{"examples": examples consumed, "step": the step of the next batch}."""
        return {"examples": self._consumed, "step": self._step}

    def restore(self, state: dict[str, Any]) -> None:
        """See `Batches.restore`. The batch sizes may be others than before."""
        self.close()
        self._consumed = int(state["examples"])
        self._step = int(state.get("step", self._step))  # positions from before sizes could change say no step

    def records(self, step: int) -> str:
        """See `Batches.records`: each source, and which of its windows."""
        batches = self._order.batches
        first = self._consumed - batches.examples_between(step, self._step)
        return self._order.mixture.describe(first + np.arange(batches.at(step).size))

    def close(self) -> None:
        """Stops reading ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def _nth_batch(order: _Order, consumed: int, first_step: int, number: int) -> TokenBatch:
    step = first_step + number
    return order.batch(consumed + order.batches.examples_between(first_step, step), order.batches.at(step))


def eval_batches(
    windows: PackedSequences, *, batch_size: int, layout: Layout, max_batches: int | None
) -> Iterator[TokenBatch]:
    """One pass in order, as batches {batch, position}; rows beyond the end are padding with no weight."""
    axes = (hax.Axis(BATCH, batch_size), hax.Axis(POSITION, windows.seq_len))
    num_batches = -(-len(windows) // batch_size)
    for number in range(num_batches if max_batches is None else min(num_batches, max_batches)):
        yield _on_devices(lambda rows, first=number * batch_size: _padded(windows, first + rows), axes, layout)


def _padded(windows: PackedSequences, indices: np.ndarray) -> Columns:
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
