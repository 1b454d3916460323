"""Preemption (SIGTERM) and Ctrl-C (SIGINT): the first signal saves and stops, the second exits at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_HANDLED = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Records the first signal received.

    Attributes:
        signal: signal number; 0 if none was received.
    """

    def __init__(self) -> None:
        self.signal = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.signal:
            # Not sys.exit: on a second signal, do not wait for anything, not even a save.
            os._exit(128 + number)
        self.signal = number


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Handles both signals inside the block, then restores the previous handlers.

    Outside the main thread, where Python allows no signal handlers, signals are not handled.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request.receive) for number in _HANDLED}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
