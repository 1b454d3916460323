"""Batches of examples on the devices, prefetched in a background thread. Each process reads only its own rows."""

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import haliax as hax
import numpy as np

from jaxlm.core.axes import BATCH, MICROBATCH
from jaxlm.core.precision import FLOAT32, Precision
from jaxlm.core.sharding import Layout
from jaxlm.core.tracing import BlockSizes
from jaxlm.core.values.logged import ScoredRows
from jaxlm.data.base import Batches, Log
from jaxlm.data.batch import BatchSpec, Columns
from jaxlm.data.batch_schedule import BatchSchedule, BatchStage
from jaxlm.data.examples import Examples
from jaxlm.data.masking import MaskingConfig
from jaxlm.data.mixture import Mixture
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.models.inference.decoding import XlaOptions

T = TypeVar("T")

_POLL_S = 0.05  # how often the idle thread checks whether its owner still exists


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class Prefetch(Generic[T]):
    """Yields `make(0), make(1), ...`, made up to `depth` items ahead in a background thread.

    `take` does not wake the thread while an item is ready: a woken thread may take the core or the GIL from its waker, and a
    ready batch would then cost milliseconds. Call `refill` to wake the thread when that costs nothing.

    The thread ends on `close`, when this object is garbage-collected, or with the main thread. It is not a daemon: a daemon
    thread inside the device runtime during interpreter shutdown can crash the process.
    """

    def __init__(self, make: Callable[[int], T], depth: int):
        self._ready: queue.SimpleQueue[T | _Failure] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._failure: _Failure | None = None
        self._closed = threading.Event()
        # A weak reference: otherwise the thread would keep its owner alive, and never end.
        args = (weakref.ref(self), self._closed, self._wake, self._ready, make, depth)
        self._thread = threading.Thread(target=_fill, args=args, name="prefetch")
        self._thread.start()

    def take(self) -> T:
        """The next item.

        Raises:
            BaseException: the exception that `make` raised, with its traceback; raised again by every later call.
        """
        if self._ready.empty():
            self._wake.set()
        item = self._failure or self._ready.get()
        if isinstance(item, _Failure):
            self._failure = item
            raise item.error
        return item

    def refill(self) -> None:
        """Wakes the thread to replace the items taken."""
        self._wake.set()

    def close(self) -> None:
        """Ends the thread and joins it. Waits at most for the item being made."""
        self._closed.set()
        self._wake.set()
        self._thread.join()


def _fill(
    owner: weakref.ref,
    closed: threading.Event,
    wake: threading.Event,
    ready: "queue.SimpleQueue[T | _Failure]",
    make: Callable[[int], T],
    depth: int,
) -> None:
    def should_run() -> bool:
        return not closed.is_set() and owner() is not None and threading.main_thread().is_alive()

    number = 0
    while should_run():
        wake.clear()  # before checking the queue, so an item taken in between is not missed
        if ready.qsize() >= depth:
            wake.wait(_POLL_S)
            continue
        try:
            ready.put(make(number))
        except BaseException as error:  # raised again by `take`, in the consumer's thread
            ready.put(_Failure(error))
            return
        number += 1


_PREFETCHED = 2
_READ_AHEAD = 4  # batches whose tokens are downloaded, if they are at a URL, while earlier ones are prefetched


@dataclass(frozen=True)
class BatchReader:
    """Reads consecutive examples as a batch {microbatch, batch, ...} on the devices.

    Row m * batch + j of a step is row j of microbatch m. Rows past the step's batch size are padding: zeros in all columns.
    """

    mixture: Mixture
    spec: BatchSpec[Any]
    batches: BatchSchedule
    layout: Layout

    def batch(self, first: int, stage: BatchStage) -> Any:
        """The batch whose first example is `first`."""

        def read(rows: np.ndarray) -> Columns:
            columns = self.mixture.read(first + rows)
            self.mixture.read_ahead(first + _READ_AHEAD * stage.size + rows)
            return _zero_rows(columns, rows >= stage.size)

        return self.spec.assemble(read, leading_axes(stage), self.layout)


def leading_axes(stage: BatchStage) -> tuple[hax.Axis, hax.Axis]:
    """{microbatch, batch} of a stage's training batches."""
    num_microbatches, microbatch = stage.shape
    return hax.Axis(MICROBATCH, num_microbatches), hax.Axis(BATCH, microbatch)


class ExampleBatches(Batches):
    """Training batches. Each step takes the examples that follow those of all steps before it."""

    def __init__(self, reader: BatchReader, first_step: int = 0):
        """Args: first_step: step of the schedule that the first batch belongs to."""
        self._reader = reader
        self._step = first_step
        self._consumed = 0
        self._skipped = 0
        self._prefetch: Prefetch[Any] | None = None

    def __next__(self) -> Any:
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


class LogRollout(Protocol):
    """Gets the step that a rollout is for, its completions, their rewards by name, and their advantages."""

    def __call__(
        self, step: int, rows: ScoredRows, scores: Mapping[str, np.ndarray], advantages: np.ndarray, /
    ) -> None: ...


@dataclass(frozen=True)
class RunServices:
    """Holds what batches that ask the model may use of the run.

    Attributes:
        precision: how the model is cast for computation.
        log: writes a line to the console.
        stop_ids: the tokens that end an answer, with those of the run's chat templates; None takes the tokenizer's.
        progress: says that the run has not stopped, while one call takes long.
        log_rollout: logs completions that the model trains on.
        export: writes the weights of the model that trains, without adapters, to a new folder in the format of transformers.
            All processes call it.
        xla_options, block_sizes: what the training step is compiled with.
    """

    precision: Precision = FLOAT32
    log: Log = print
    stop_ids: tuple[int, ...] | None = None
    progress: Callable[[], None] = lambda: None
    log_rollout: LogRollout = lambda step, rows, scores, advantages: None
    export: Callable[[Any, Path], None] = lambda model, folder: None
    xla_options: XlaOptions = ()
    block_sizes: BlockSizes = field(default_factory=BlockSizes)


@dataclass(frozen=True)
class BatchContext:
    """Holds what batches may need.

    Attributes:
        start: first step of the phase.
        first_step: step of the schedule that the first batch belongs to.
        seed: random seed of the order of the training data.
    """

    start: int
    first_step: int
    seed: int
    services: RunServices


BatchMaker = Callable[[BatchReader, BatchContext], Batches]


def example_batches(reader: BatchReader, context: BatchContext) -> Batches:
    """The batches of data that does not depend on the model."""
    return ExampleBatches(reader, context.first_step)


@dataclass(frozen=True)
class Batching:
    """Says how the examples of a kind of data become training batches.

    Attributes:
        maker: tokenizer -> the function that makes the batches.
        has_examples_per_step: whether each step trains on as many new examples as its batch has, so that epochs determine
            the steps.
        masking: which tokens of the examples are hidden; None hides none.
        never_repeats: the key with which the text is not read alike in every epoch, and what to change, so that what is
            stored about an example fits again; None if examples repeat.
    """

    maker: Callable[[Tokenizer], BatchMaker] = lambda tokenizer: example_batches
    has_examples_per_step: bool = True
    masking: MaskingConfig | None = None
    never_repeats: str | None = None

    def finish(self, examples: Examples, source: str, split: str, tokenizer: Tokenizer) -> Examples:
        """The examples of a split as batches read them. Args: source: its name."""
        return examples if self.masking is None else self.masking.hide(examples, source, split, tokenizer)


def _nth_batch(reader: BatchReader, consumed: int, first_step: int, number: int) -> Any:
    step = first_step + number
    return reader.batch(consumed + reader.batches.examples_between(first_step, step), reader.batches.at(step))


def eval_batches(
    examples: Examples, spec: BatchSpec[Any], *, batch_size: int, layout: Layout, max_batches: int | None
) -> Iterator[Any]:
    """One pass over the examples in order, as batches {batch, ...}. Rows past the end are padding: zeros in all columns.

    Of endless examples, `max_batches` may be more than one pass.
    """
    leading = (hax.Axis(BATCH, batch_size),)
    end = examples.num_evaluated(None if max_batches is None else max_batches * batch_size)
    for first in range(0, end, batch_size):
        yield spec.assemble(lambda rows, first=first: _read_padded(examples, first + rows, end), leading, layout)


def _read_padded(examples: Examples, indices: np.ndarray, end: int) -> Columns:
    """Examples, and padding from the index `end` on."""
    examples.read_ahead(np.minimum(indices + _READ_AHEAD * len(indices), end - 1))
    return _zero_rows(examples.read(np.minimum(indices, end - 1)), indices >= end)


def _zero_rows(columns: Columns, is_padding: np.ndarray) -> Columns:
    """Zeroes the padding rows in place, loss mask included."""
    if is_padding.any():
        for column in columns.values():
            column[is_padding] = 0
    return columns
