"""Windows into batches on the devices: read ahead in the background, each process only its own rows."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import haliax as hax
import jax
import numpy as np

from jaxlm.core.axes import BATCH, MICROBATCH, POSITION
from jaxlm.core.sharding import Layout
from jaxlm.core.types import TokenBatch
from jaxlm.data.base import Batches
from jaxlm.data.packing import Windows
from jaxlm.data.shuffle import permuted

_PREFETCHED = 2
_COLUMNS = ("tokens", "targets", "loss_mask", "segment_ids", "positions")

Columns = dict[str, np.ndarray]


def train_batches(
    windows: Windows, *, batch_size: int, num_microbatches: int, layout: Layout, seed: int, shuffle: bool
) -> "WindowBatches":
    """Batches {microbatch, batch, position} of windows, epoch after epoch."""
    return WindowBatches(windows, batch_size, num_microbatches, layout, seed, shuffle)


class WindowBatches(Batches):
    """Row r of batch b is example b x batch_size + r of an endless order that only the seed decides."""

    def __init__(
        self, windows: Windows, batch_size: int, num_microbatches: int, layout: Layout, seed: int, shuffle: bool
    ):
        self._windows = windows
        self._batch_size = batch_size
        self._layout = layout
        self._order = (seed, shuffle)
        self._axes = (
            hax.Axis(MICROBATCH, num_microbatches),
            hax.Axis(BATCH, batch_size // num_microbatches),
            hax.Axis(POSITION, windows.seq_len),
        )
        self._consumed = 0
        self._ahead: _Ahead | None = None

    def __next__(self) -> TokenBatch:
        if self._ahead is None:
            self._ahead = _Ahead(self._make, start=self._consumed // self._batch_size)
        batch = self._ahead.take()
        self._consumed += self._batch_size
        return batch

    def state(self) -> dict[str, Any]:
        """{"examples": examples consumed}."""
        return {"examples": self._consumed}

    def restore(self, state: dict[str, Any]) -> None:
        """See `Batches.restore`."""
        self.close()
        self._consumed = int(state["examples"])

    def close(self) -> None:
        """Stops reading ahead."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def _make(self, number: int) -> TokenBatch:
        def read(rows: np.ndarray) -> Columns:
            return self._windows.read(self._places(number * self._batch_size + rows))

        return _on_devices(read, self._axes, self._layout)

    def _places(self, examples: np.ndarray) -> np.ndarray:
        """Which windows the examples are: O(1) each, by the permutation of their epoch."""
        seed, shuffle = self._order
        epoch, index = np.divmod(examples, len(self._windows))
        return permuted(index, len(self._windows), seed=seed, epoch=epoch) if shuffle else index


def eval_batches(
    windows: Windows, *, batch_size: int, layout: Layout, max_batches: int | None
) -> Iterator[TokenBatch]:
    """One pass in order, as batches {batch, position}; rows beyond the end are padding with no weight."""
    axes = (hax.Axis(BATCH, batch_size), hax.Axis(POSITION, windows.seq_len))
    num_batches = -(-len(windows) // batch_size)
    for number in range(num_batches if max_batches is None else min(num_batches, max_batches)):
        yield _on_devices(lambda rows, first=number * batch_size: _padded(windows, first + rows), axes, layout)


def _padded(windows: Windows, indices: np.ndarray) -> Columns:
    columns = windows.read(np.minimum(indices, len(windows) - 1))
    beyond = indices >= len(windows)
    columns["loss_mask"][beyond] = 0
    columns["segment_ids"][beyond] = 0
    return columns


def _on_devices(read: Callable[[np.ndarray], Columns], axes: tuple[hax.Axis, ...], layout: Layout) -> TokenBatch:
    """Reads this process's rows, each once, and puts every device's part on it."""
    place = layout.compute_sharding(axes)
    shape = tuple(axis.size for axis in axes)
    numbers = np.arange(int(np.prod(shape[:-1]))).reshape(shape[:-1])
    parts = {device: index[:-1] for device, index in place.addressable_devices_indices_map(shape).items()}
    mine = np.unique(np.concatenate([numbers[part].ravel() for part in parts.values()]))
    columns = read(mine)

    def column(name: str) -> hax.NamedArray:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            rows = numbers[index[:-1]]
            found = columns[name][np.searchsorted(mine, rows.ravel())]
            return found.reshape(*rows.shape, shape[-1])[..., index[-1]]

        return hax.NamedArray(jax.make_array_from_callback(shape, place, part), axes)

    return TokenBatch(**{name: column(name) for name in _COLUMNS})


class _Ahead:
    """Makes batches in a thread, a few ahead of the one that is asked for."""

    def __init__(self, make: Callable[[int], TokenBatch], start: int):
        self._make = make
        self._ready: queue.Queue[TokenBatch | BaseException] = queue.Queue(maxsize=_PREFETCHED)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(start,), name="batches", daemon=True)
        self._thread.start()

    def take(self) -> TokenBatch:
        found = self._ready.get()
        if isinstance(found, BaseException):
            self._stopped.set()
            raise found  # with the traceback that it got in the thread
        return found

    def stop(self) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)  # a thread that waits for room finds it, and the flag
            except queue.Empty:
                continue

    def _run(self, number: int) -> None:
        while not self._stopped.is_set():
            try:
                self._ready.put(self._make(number))
            except BaseException as error:  # raised again where the batch is asked for
                self._ready.put(error)
                return
            number += 1
