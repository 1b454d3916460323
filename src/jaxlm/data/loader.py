"""Batches of sequences on the devices, prefetched in the background. Each process reads only its own rows."""

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

    If a batch's examples do not fill its microbatches, the rest is padding with loss mask 0.

    Args:
        first_step: step of the schedule that the first batch belongs to.
    """
    return SequenceBatches(_BatchReader(mixture, batches, layout), first_step)


@dataclass(frozen=True)
class _BatchReader:
    """Reads consecutive examples as a batch on the devices.

    Row m * batch + j of a step is row j of microbatch m; rows past the step's batch size are padding.
    """

    mixture: Mixture
    batches: BatchSchedule
    layout: Layout

    def batch(self, first: int, stage: BatchStage) -> TokenBatch:
        """The batch whose first example is `first`."""
        axes = (
            hax.Axis(MICROBATCH, stage.num_microbatches),
            hax.Axis(BATCH, stage.microbatch),
            hax.Axis(POSITION, self.mixture.seq_len),
        )

        def read(rows: np.ndarray) -> Columns:
            return _zero_rows(self.mixture.read(first + rows), rows >= stage.size)

        return _on_devices(read, axes, self.layout)


class SequenceBatches(Batches):
    """Training batches. Each step takes the examples that follow those of all steps before it."""

    def __init__(self, reader: _BatchReader, first_step: int):
        self._reader = reader
        self._step = first_step
        self._consumed = 0
        self._skipped = 0
        self._prefetch: Prefetch[TokenBatch] | None = None

    def __next__(self) -> TokenBatch:
        if self._prefetch is None:
            # Bound to plain values, not to `self`, which the thread must not keep alive.
            make = functools.partial(_nth_batch, self._reader, self._consumed, self._step)
            self._prefetch = Prefetch(make, depth=_PREFETCHED)
        batch = self._prefetch.take()
        self._consumed += self._reader.batches.at(self._step).size
        self._step += 1
        return batch

    def read_ahead(self) -> None:
        if self._prefetch is not None:
            self._prefetch.refill()

    def state(self) -> dict[str, Any]:
        """{"examples": number of examples consumed, "step": step of the next batch}.

        `skipped` is how many of these examples were left out; absent if none were.
        """
        skipped = {"skipped": self._skipped} if self._skipped else {}
        return {"examples": self._consumed, "step": self._step, **skipped}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a position; batch sizes may differ from those of the run that saved it."""
        self.close()
        self._consumed = int(state["examples"])
        self._step = int(state.get("step", self._step))  # positions saved by old versions have no step
        self._skipped = int(state.get("skipped", 0))

    def skip(self, num_steps: int) -> None:
        self.close()
        examples = self._reader.batches.examples_between(self._step, self._step + num_steps)
        self._consumed += examples
        self._skipped += examples

    def records(self, step: int) -> str:
        batches = self._reader.batches
        first = self._consumed - batches.examples_between(step, self._step)
        return self._reader.mixture.describe(first + np.arange(batches.at(step).size))

    def close(self) -> None:
        if self._prefetch is not None:
            self._prefetch.close()
            self._prefetch = None


def _nth_batch(reader: _BatchReader, consumed: int, first_step: int, number: int) -> TokenBatch:
    step = first_step + number
    return reader.batch(consumed + reader.batches.examples_between(first_step, step), reader.batches.at(step))


def eval_batches(
    sequences: PackedSequences, *, batch_size: int, layout: Layout, max_batches: int | None
) -> Iterator[TokenBatch]:
    """One pass over the sequences in order, as batches {batch, position}. Rows past the end are padding with loss mask 0."""
    axes = (hax.Axis(BATCH, batch_size), hax.Axis(POSITION, sequences.seq_len))
    num_batches = -(-len(sequences) // batch_size)
    for number in range(num_batches if max_batches is None else min(num_batches, max_batches)):
        yield _on_devices(lambda rows, first=number * batch_size: _read_padded(sequences, first + rows), axes, layout)


def _read_padded(sequences: PackedSequences, indices: np.ndarray) -> Columns:
    return _zero_rows(sequences.read(np.minimum(indices, len(sequences) - 1)), indices >= len(sequences))


def _zero_rows(columns: Columns, is_padding: np.ndarray) -> Columns:
    """Zeroes the padding rows in place, loss mask included."""
    if is_padding.any():
        for column in columns.values():
            column[is_padding] = 0
    return columns


def _on_devices(read: Callable[[np.ndarray], Columns], axes: tuple[hax.Axis, ...], layout: Layout) -> TokenBatch:
    """Reads each row of this process's shards once, and assembles the global batch."""
    sharding = layout.compute_sharding(axes)
    shape = tuple(axis.size for axis in axes)
    numbers = np.arange(int(np.prod(shape[:-1]))).reshape(shape[:-1])
    shards = [index for index in sharding.addressable_devices_indices_map(shape).values() if index is not None]
    local_rows = np.unique(np.concatenate([numbers[shard[:-1]].ravel() for shard in shards]))
    columns = read(local_rows)

    def column(name: str) -> hax.NamedArray:
        def shard_data(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "every addressable shard has an index"
            rows = numbers[index[:-1]]
            values = columns[name][np.searchsorted(local_rows, rows.ravel())]
            return values.reshape(*rows.shape, shape[-1])[..., index[-1]]

        return hax.NamedArray(jax.make_array_from_callback(shape, sharding, shard_data), axes)

    return TokenBatch(**{name: column(name) for name in _COLUMNS})
