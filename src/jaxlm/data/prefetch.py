"""Making things ahead of time in a thread."""

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_POLL_S = 0.05  # how soon a thread that nobody wakes sees that nobody wants more


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class Prefetch(Generic[T]):
    """`make(0), make(1), ...`, a few of them ahead of the one that is asked for.

    Taking wakes nobody while something is ready: a thread that wakes may get the core, or the GIL, of the one that wakes
    it, and then a batch that lies there costs its taker milliseconds. `refill` wakes, where that costs nothing.

    The thread ends with `close`, when nothing refers to this object any more, or with the main thread. It is no daemon:
    a daemon that is inside of the device runtime while the interpreter takes itself apart can crash the process.
    """

    def __init__(self, make: Callable[[int], T], depth: int):
        self._ready: queue.SimpleQueue[T | _Failure] = queue.SimpleQueue()
        self._look = threading.Event()
        self._failure: _Failure | None = None
        self._closed = threading.Event()
        # The thread must not keep its owner alive, or a forgotten owner would never end.
        args = (weakref.ref(self), self._closed, self._look, self._ready, make, depth)
        self._thread = threading.Thread(target=_fill, args=args, name="prefetch")
        self._thread.start()

    def take(self) -> T:
        """The next one.

        Raises:
            BaseException: what `make` raised, with its traceback; again at every later call.
        """
        if self._ready.empty():
            self._look.set()
        found = self._failure or self._ready.get()
        if isinstance(found, _Failure):
            self._failure = found
            raise found.error
        return found

    def refill(self) -> None:
        """Has the thread make up for what was taken, now and not when it happens to look."""
        self._look.set()

    def close(self) -> None:
        """Ends the thread and waits for it, at most for the one that it is making."""
        self._closed.set()
        self._look.set()
        self._thread.join()


def _fill(
    owner: weakref.ref,
    closed: threading.Event,
    look: threading.Event,
    ready: "queue.SimpleQueue[T | _Failure]",
    make: Callable[[int], T],
    depth: int,
) -> None:
    def wanted() -> bool:
        return not closed.is_set() and owner() is not None and threading.main_thread().is_alive()

    number = 0
    while wanted():
        look.clear()  # before the queue is looked at: whoever takes in between is not missed
        if ready.qsize() >= depth:
            look.wait(_POLL_S)
            continue
        try:
            ready.put(make(number))
        except BaseException as error:  # nobody sees it here: it is raised where the result is asked for
            ready.put(_Failure(error))
            return
        number += 1
