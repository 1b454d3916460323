"""Ends all processes of a run when one of them fails, with its message and its exit code.

jax only notices a process that stops sending heartbeats, and then aborts the others. A process that ends with an error would
leave the others waiting in a collective until then. So each process writes its failure to the key-value store of jax's
coordination service, and a thread of each process looks there every second. Process 0 also watches for processes that were
killed or stopped, and the others for process 0. Only if process 0 is killed does jax abort the others first: the service that
they are connected to is gone.
"""

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxlm.core.distributed import DistributedConfig
from jaxlm.core.errors import say
from jaxlm.core.exchange import coordination

_INTERVAL_S = 1.0
_SILENT_S = 3 * _INTERVAL_S
_NOTICE_S = 1.5 * _INTERVAL_S  # so that the others read why this process ends before their collectives fail
_LINGER_S = 10.0  # process 0 hosts the store; the others get this long to read it
_LEAVING_S = 0.5  # ... and this long to end after saying so: without the store, jax aborts them
_FAILED, _LEFT, _ALIVE = "jaxlm/failed/", "jaxlm/left/", "jaxlm/alive/"
_MAX_MESSAGE = 4000
_FINISHED = "finished"  # instead of a heartbeat
_LOST_PEER = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Connection closed", "Connection reset")
_STATUS = re.compile(r"[A-Z_]+: ")


class PeerWatch:
    """Watches the other processes of the run, and tells them if this one fails."""

    def __init__(self, client: Any, index: int, count: int, timeout_s: float):
        """Args:
        client: of jax's coordination service.
        index, count: this process, and the number of processes.
        timeout_s: a process is lost if it has been silent for this long.
        """
        self._client = client
        self._index = index
        self._timeout_s = timeout_s
        # Process -> its last heartbeat, and when it was seen. All have connected, so all should send one from now on.
        self._seen = {str(other): ("", time.monotonic()) for other in range(count) if other != index}
        self._num_answers = 0
        self._ended = threading.Event()
        self._exiting = threading.Lock()
        self._message = ""  # what this process has said about its own failure
        for target in (self._watch, self._watch_service):
            threading.Thread(target=target, name="jaxlm-peers", daemon=True).start()

    def stop(self) -> None:
        """Stops watching, because this process has finished."""
        self._ended.set()
        with contextlib.suppress(Exception):  # the others may have left
            self._client.key_value_set(f"{_ALIVE}{self._index}", _FINISHED, allow_overwrite=True)

    def fail(self, code: int, message: str) -> None:
        """Ends all processes with a message, this one included. Does not return."""
        self._message = message[:_MAX_MESSAGE]
        failure = json.dumps({"code": code, "message": self._message})
        # The service may be gone. Or another thread has said why already: what fails after that is a consequence.
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{_FAILED}{self._index}", failure)
        time.sleep(_NOTICE_S)
        self._exit(code)

    def _watch(self) -> None:
        beat = 0
        while not self._ended.wait(_INTERVAL_S):
            beat += 1
            try:
                self._client.key_value_set(f"{_ALIVE}{self._index}", str(beat), allow_overwrite=True)
                failures = self._client.key_value_dir_get(_FAILED)
                failures = [failure for failure in failures if failure[0] != f"{_FAILED}{self._index}"]
                silences = self._silences() if self._index == 0 else {}
                lost = sorted(process for process, silence in silences.items() if silence > self._timeout_s)
                self._num_answers += 1
            except Exception as error:  # the client's own types; process 0 hosts the service
                if not self._ended.is_set():
                    line = str(error).partition("\n")[0][:200]
                    say(f"error: process 0 cannot be reached ({line}): it was killed, or its machine is down")
                    self._exit(1)
                return
            if failures and not self._ended.is_set():
                process, failure = failures[0][0].rpartition("/")[2], json.loads(failures[0][1])
                if failure["message"] != self._message:  # all may have found the same
                    say(f"error: process {process}: {failure['message']}")
                self._exit(failure["code"])
            if lost:
                names = ", ".join(lost)
                message = (
                    f"no heartbeat of process {names} for {self._timeout_s:.0f} s: killed, stopped, or disconnected"
                )
                say(f"error: {message}")
                self.fail(1, message)

    def _watch_service(self) -> None:
        """Notices when the service no longer answers.

        Counts only the time in which this process runs: after a pause, or while something else does not let its threads run,
        it has not listened to an answer that may be there.
        """
        silent_s, answers, before = 0.0, 0, time.monotonic()
        while not self._ended.wait(_INTERVAL_S):
            now = time.monotonic()
            silent_s = silent_s + min(now - before, 2 * _INTERVAL_S) if self._num_answers == answers else 0.0
            answers, before = self._num_answers, now
            if silent_s > self._timeout_s:
                say(f"error: no answer of process 0 for {self._timeout_s:.0f} s: it was stopped, or is disconnected")
                os._exit(1)

    def _others_remain(self) -> bool:
        """Tells whether a process that has not left still sends heartbeats."""
        left = {key.rpartition("/")[2] for key, _ in self._client.key_value_dir_get(_LEFT)}
        silences = self._silences()
        # A process that has not sent any yet has just started.
        return any(
            silence < _SILENT_S or not self._seen[process][0]
            for process, silence in silences.items()
            if process not in left
        )

    def _silences(self) -> dict[str, float]:
        """Seconds since the last heartbeat of each process that has not finished."""
        now = time.monotonic()
        for key, value in self._client.key_value_dir_get(_ALIVE):
            process = key.rpartition("/")[2]
            if process in self._seen and self._seen[process][0] != value:
                self._seen[process] = (value, now)
        return {process: now - at for process, (value, at) in self._seen.items() if value != _FINISHED}

    def _exit(self, code: int) -> None:
        """Ends the process without jax's own shutdown, which would wait for the others, and abort without them."""
        self._exiting.acquire()  # never released: only one thread ends the process
        self._ended.set()
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{_LEFT}{self._index}", "", allow_overwrite=True)
            deadline = time.monotonic() + _LINGER_S
            while self._index == 0 and time.monotonic() < deadline and self._others_remain():
                time.sleep(0.1)
            if self._index == 0:
                time.sleep(_LEAVING_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_watches: list[PeerWatch] = []
_unconnected: list[Callable[[], DistributedConfig]] = []


def connect_if_it_fails(distributed: Callable[[], DistributedConfig]) -> None:
    """If this process fails before `watch_peers`, it connects to the others to tell them: they wait for it.

    Args:
        distributed: how the processes connect, as far as that can be told. The configuration may be what is wrong.
    """
    _unconnected[:] = [distributed]


def watch_peers(timeout_s: float) -> None:
    """Starts watching the other processes, if there are any. Call it once jax.distributed is initialized."""
    _unconnected.clear()
    if (service := coordination()) is not None:
        _watches.append(PeerWatch(service.client, service.process_id, service.num_processes, timeout_s))


def end_with_peers(code: int, message: str) -> None:
    """Ends the process, and the other processes of the run, after a failure. Returns if there are no others."""
    if (distributed := _awaited()) is not None:
        with contextlib.suppress(Exception):  # it must not hide what has failed
            distributed.join(failed=code)
            watch_peers(distributed.heartbeat_timeout.total_seconds())
    _unconnected.clear()
    for watch in _watches:
        watch.fail(code, message)


def stop_watching_peers() -> None:
    """Stops watching the other processes, because this one has finished."""
    for watch in _watches:
        watch.stop()


def has_peers() -> bool:
    """Tells whether this is one of several processes of a run, connected or not."""
    return bool(_watches) or _awaited() is not None


def _awaited() -> DistributedConfig | None:
    """Tells how to connect to processes that wait for this one; None if it has connected, or if there are none."""
    for distributed in _unconnected:
        with contextlib.suppress(Exception):  # the configuration may be what is wrong
            return config if (config := distributed()).has_several_processes else None
    return None


def is_lost_peer(error: BaseException) -> bool:
    """Tells whether a collective failed because another process is gone."""
    if not _watches or not any(text in str(error) for text in _LOST_PEER):
        return False
    # jax raises a ValueError with a status for what fails while an array is fetched.
    of_fetching = isinstance(error, ValueError) and _STATUS.match(str(error)) is not None
    return of_fetching or isinstance(error, jax.errors.JaxRuntimeError)
