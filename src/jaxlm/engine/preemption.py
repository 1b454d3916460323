"""Stops a run on SIGTERM (preemption), on Ctrl-C (SIGINT), and on notices that the machine will stop.

The first of them saves and stops, a second signal exits at once. Python runs signal handlers on the main thread, which may
be inside a compilation or a long step for minutes. So a thread watches the file descriptor to which Python writes each
signal at once, and answers for the main thread.

Google Compute Engine says beforehand that it will stop a machine: a spot machine, or one whose host gets maintenance. The
machine's metadata server has `preempted` (30 s before a spot machine stops) and `maintenance-event` (60 s before a machine
stops for maintenance, an hour if it has GPUs). A request with `wait_for_change` is answered when something changes, so one
thread with one open request notices both at once. The shutdown itself comes later, as SIGTERM, and may leave too little
time.

A live migration (`MIGRATE_ON_HOST_MAINTENANCE`) does not stop a machine. Neither does a notice that was there before this
process stop it again: after an hour's notice, a run that saved and restarted on the same machine would otherwise never
train.
"""

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

PREEMPTED = int(signal.NSIG)
"""In the place of a signal's number: the machine said that it will stop (`watch_notices`)."""

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
        _say(f"{reason}: {_SAVING}")

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
            # Skips what counts as the same signal. The system measures the time: this thread would measure how late it is,
            # because the main thread may hold Python's lock for long.
            end = time.monotonic() + _TOGETHER_S
            while select.select([signals], [], [], max(0.0, end - time.monotonic()))[0]:
                if not signals.recv(1):
                    return  # closed
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


def _exit(number: int, text: str) -> None:
    _say(text)
    os._exit(128 + number)


def _say(text: str) -> None:
    """Writes a line to standard error, from any thread and in any state of the process."""
    with contextlib.suppress(OSError):  # standard error may be closed
        os.write(2, f"\n{text}\n".encode())


_PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
_HOST = "metadata.google.internal"
_INSTANCE = "/computeMetadata/v1/instance/?recursive=true&alt=json"
_FLAVOR = ("Metadata-Flavor", "Google")
_WAIT_S = 60  # the server answers after this time even if nothing has changed
_ANSWER_S = 10.0
_MOST_BYTES = 16 * 2**20
_AFTER_ANSWER_S = 1.0
_LONGEST_PAUSE_S = 60.0


def metadata_host() -> str | None:
    """The metadata server of this machine; None if it is not one of Google Compute Engine. Needs no network."""
    if host := os.environ.get("GCE_METADATA_HOST"):
        return host
    try:
        return _HOST if _PRODUCT_NAME.read_text().startswith("Google") else None
    except (OSError, UnicodeDecodeError):
        return None


@contextlib.contextmanager
def watch_notices(request: StopRequest, host: str | None) -> Iterator[None]:
    """Requests a stop as soon as the server says that the machine will stop, while the context is open.

    Args:
        host: None watches none.
    """
    ended = threading.Event()
    if host is not None:
        threading.Thread(target=_watch, args=(request, host, ended), name="jaxlm-notices", daemon=True).start()
    try:
        yield
    finally:
        ended.set()  # not joined: it may be waiting for the server


def _watch(request: StopRequest, host: str, ended: threading.Event) -> None:
    """Whatever the server does, the run goes on: a request that fails is repeated, ever more rarely."""
    before, etag, pause_s = None, None, 0.0
    while not ended.wait(pause_s):
        try:
            now, etag = _ask(host, etag)
        # JSON and Unicode errors are ValueErrors.
        except (OSError, http.client.HTTPException, ValueError, RecursionError):
            pause_s = min(max(2 * pause_s, _AFTER_ANSWER_S), _LONGEST_PAUSE_S)
            continue
        pause_s = _AFTER_ANSWER_S
        if now and before is None:
            _say(f"{now}, since before this start: the run goes on until the machine stops")
        elif now and now != before and not ended.is_set():
            request.preempt(now)
        before = now


def _ask(host: str, etag: str | None) -> tuple[str, str | None]:
    """The pending notice, "" for none, and the version of the answer.

    Args:
        etag: version of the last answer; the server waits until it changes. None does not wait.
    """
    wait = "" if etag is None else f"&wait_for_change=true&timeout_sec={_WAIT_S}&last_etag={etag}"
    # Not urllib, which would ask a proxy.
    with contextlib.closing(http.client.HTTPConnection(host, timeout=_ANSWER_S + bool(wait) * _WAIT_S)) as connection:
        connection.request("GET", _INSTANCE + wait, headers=dict([_FLAVOR]))
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK or answer.getheader(_FLAVOR[0]) != _FLAVOR[1]:
            raise ValueError("not an answer of a metadata server")
        return _notice(json.loads(answer.read(_MOST_BYTES))), answer.getheader("ETag")


def _notice(instance: Any) -> str:
    if not isinstance(instance, dict):
        raise ValueError("not the metadata of a machine")
    if instance.get("preempted") == "TRUE":
        return "Google Compute Engine preempts this machine"
    if str(instance.get("maintenanceEvent")).startswith("TERMINATE"):
        return "Google Compute Engine will stop this machine for maintenance of its host"
    return ""
