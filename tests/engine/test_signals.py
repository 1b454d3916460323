"""The thread that answers signals, when it is late."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from jaxlm.engine import preemption
from jaxlm.engine.preemption import StopRequest

TERM = bytes([signal.SIGTERM])


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What it has said. After each line, it does not run for longer than the time in which signals count as one."""
    lines: list[str] = []
    monkeypatch.setattr(preemption, "_TOGETHER_S", 0.05)
    monkeypatch.setattr(preemption, "_say", lambda text: lines.append(text) or time.sleep(0.2))
    monkeypatch.setattr(preemption, "_exit", lambda number, text: lines.append(f"exit {128 + number}: {text}"))
    return lines


@contextlib.contextmanager
def answering() -> Iterator[socket.socket]:
    """The socket to which Python writes signals. At the end of the block, all of them are answered."""
    request = StopRequest()
    request.is_training = True
    ours, pythons = socket.socketpair()
    thread = threading.Thread(target=request.answer, args=(ours,))
    try:
        with pythons:
            pythons.send(TERM + TERM)  # as `timeout` does, which signals its group and its child
            thread.start()
            yield pythons
    finally:
        thread.join()
        ours.close()


def test_two_signals_that_are_sent_together_are_one(said):
    with answering():
        pass
    assert said == [
        "SIGTERM received: saving after the steps that are under way, then stopping. A second signal stops at once"
    ]


def test_a_later_signal_ends_the_run_at_once(said):
    with answering() as pythons:
        end = time.monotonic() + 60
        while len(said) < 2 and time.monotonic() < end:
            time.sleep(0.1)
            pythons.send(TERM)
    assert said[1] == "exit 143: stopped by a second SIGTERM; the run continues from its newest checkpoint"
