"""Prefetching in a background thread."""

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

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
