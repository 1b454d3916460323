"""SIGTERM and SIGINT: the first asks to stop after the current step, the second stops at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_HANDLED = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether a signal has arrived.

    Attributes:
        signal: its number, or 0.
    """

    def __init__(self) -> None:
        self.signal = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.signal:
            # Not sys.exit: a second signal means that waiting for anything, a save included, is no longer wanted.
            os._exit(128 + number)
        self.signal = number


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Handles both signals inside the block, then puts the old handlers back. In other threads it handles nothing."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in _HANDLED}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
