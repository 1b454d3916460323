"""Preemption (SIGTERM) and Ctrl-C (SIGINT): the first signal saves and stops, the second exits at once.

Python runs signal handlers on the main thread, which may be inside a compilation or a long step for minutes. So a thread
watches the file descriptor to which Python writes each signal at once, and answers for the main thread.
"""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType

PREEMPTED = int(signal.NSIG)
"""In the place of a signal's number: the machine said that it will stop (`engine/notices.py`)."""

# The devices work on steps that the loop has dispatched: `MAX_IN_FLIGHT` of engine/metrics.py.
_SAVING = "saving after the steps that are under way, then stopping"
_HANDLED = (signal.SIGTERM, signal.SIGINT)
_TOGETHER_S = 1.0  # `timeout`, and parents that forward Ctrl-C, send one signal twice


class StopRequest:
    """Records the first signal or notice received.

    Attributes:
        signal: signal number, or `PREEMPTED`; 0 if none was received.
        is_training: whether a step has been dispatched. Before that there is nothing to save, and a signal ends the process.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.is_training = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.signal = self.signal or number

    def preempt(self, reason: str) -> None:
        """Requests a stop because this machine will stop."""
        self.signal = self.signal or PREEMPTED
        self.say(f"{reason}: {_SAVING}")

    @staticmethod
    def say(line: str) -> None:
        """Writes a line to standard error, from any thread and in any state of the process."""
        _say(line)

    def answer(self, signals: socket.socket) -> None:
        """Answers the signals that arrive at a socket, until it is closed."""
        is_second = False
        while number := signals.recv(1):
            if number[0] not in _HANDLED:
                continue
            name = signal.Signals(number[0]).name
            if not self.is_training:
                _exit(number[0], f"stopped by {name} before training started; nothing was lost")
            if is_second:
                # Not sys.exit: on a second signal, do not wait for anything, not even a save.
                _exit(number[0], f"stopped by a second {name}; the run continues from its newest checkpoint")
            _say(f"{name} received: {_SAVING}. A second signal stops at once")
            _skip_together(signals)
            is_second = True


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Handles both signals inside the block, then restores the previous handlers.

    Outside the main thread, where Python allows no signal handlers, signals are not handled.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    ours, pythons = socket.socketpair()
    pythons.setblocking(False)
    previous_fd = signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, request.receive) for number in _HANDLED}
    watcher = threading.Thread(target=request.answer, args=(ours,), name="jaxlm-signals", daemon=True)
    watcher.start()
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_fd)
        pythons.close()
        watcher.join()
        ours.close()


def _skip_together(signals: socket.socket) -> None:
    """Skips what arrives within the time in which signals count as one.

    The system measures that time. This thread would measure how late it is: the main thread may hold Python's lock for long.
    """
    end = time.monotonic() + _TOGETHER_S
    while select.select([signals], [], [], max(0.0, end - time.monotonic()))[0]:
        if not signals.recv(1):
            return  # closed


def _exit(number: int, text: str) -> None:
    _say(text)
    os._exit(128 + number)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # standard error may be closed
        os.write(2, f"\n{text}\n".encode())
