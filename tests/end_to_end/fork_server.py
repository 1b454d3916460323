"""Starts commands as forks of a process that has imported jaxlm, which saves two seconds of imports per start.

`ForkServer.start` returns an object with the part of `subprocess.Popen` that tests use. Each command has its own process,
working folder, environment and output, runs its module as `__main__`, and ends as an interpreter ends.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).parents[2]
# jax and Python read these when they are imported or started. (A fork adds the folders of PYTHONPATH itself.)
READ_AT_START = ("JAX_", "PYTHONUNBUFFERED", "MPL", "OMP_", "LD_")
PLOTS = "JAXLM_TEST_PLOTS"  # a variable with which a fork draws the pictures at the end of a run
_LAZY = (
    "jaxlm.train",
    "jaxlm.session.final_report",
    "orbax.checkpoint",
    "tokenizers",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
)


class ForkedProcess:
    """A command that the server has started. Behaves like `subprocess.Popen(..., text=True)`.

    Attributes:
        returncode: exit code; minus the signal that killed it; None while it runs.
    """

    def __init__(self, pid: int, status: socket.socket, stdout: IO[str], stderr: IO[str]):
        self.pid = pid
        self.returncode: int | None = None
        self.stdout, self.stderr = stdout, stderr
        self._status = status

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(64) or b"-9")
            except TimeoutError as error:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from error
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired, BlockingIOError):
            return self.wait(0)
        return None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        deadline = None if timeout is None else time.monotonic() + timeout
        texts: dict[int, str] = {}

        def read(number: int, file: IO[str]) -> None:
            texts[number] = file.read()

        readers = [threading.Thread(target=read, args=pair) for pair in enumerate((self.stdout, self.stderr))]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        self.wait(None if deadline is None else max(0.1, deadline - time.monotonic()))
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkServer:
    """The server's process, from the outside."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.end_to_end.fork_server", str(theirs.fileno())]
        path = f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
        self._process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def start(
        self, module: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> ForkedProcess:
        """Starts `python -m module arguments` in a folder."""
        out, err = os.pipe(), os.pipe()
        # Of messages: a command may have ended before its number is read here.
        ours, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "module": module,
            "arguments": list(arguments),
            "folder": str(folder),
            "environment": dict(environment),
        }
        raw = json.dumps(request).encode()
        self._requests.sendall(len(raw).to_bytes(4, "big"))
        socket.send_fds(self._requests, [b"."], [out[1], err[1], status.fileno()])
        self._requests.sendall(raw)
        for descriptor in (out[1], err[1]):
            os.close(descriptor)
        status.close()
        pid = int(ours.recv(16))
        return ForkedProcess(pid, ours, os.fdopen(out[0]), os.fdopen(err[0]))


@functools.cache
def fork_server() -> ForkServer:
    """The server of this test process."""
    return ForkServer()


def _serve(requests: socket.socket) -> None:
    """Answers requests until the other end closes. In each fork, returns by raising `SystemExit` with its exit code."""
    for name in _LAZY:
        importlib.import_module(name)
    del sys.modules["jaxlm.train"]  # it runs as __main__
    gc.collect()
    gc.freeze()
    with importlib.import_module("jaxlm.core.imports").gc_paused():
        pass  # counts the frozen objects once for all forks
    children: dict[int, socket.socket] = {}
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    waiting = selectors.DefaultSelector()
    waiting.register(requests, selectors.EVENT_READ)
    waiting.register(wake, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is wake:
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
                _reap(children)
            else:
                head = requests.recv(4, socket.MSG_WAITALL)
                if len(head) < 4:
                    return
                _, descriptors, _, _ = socket.recv_fds(requests, 1, 3)
                request = json.loads(requests.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for ours in (requests, wake, woken, waiting, *children.values()):
                        ours.close()
                    _run(request, descriptors)
                for descriptor in descriptors[:2]:
                    os.close(descriptor)
                children[pid] = socket.socket(fileno=descriptors[2])
                children[pid].sendall(str(pid).encode())


def _reap(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with children.pop(pid) as answer, contextlib.suppress(OSError):
            answer.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _run(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Runs a module in a fork."""
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[1], 2)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[0] = request["folder"]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    sys.argv = [request["module"], *request["arguments"]]
    sys.modules.pop("__main__", None)
    if PLOTS not in os.environ:
        report = importlib.import_module("jaxlm.session.final_report")
        report.write_plots = lambda *_: []  # a tenth of a run's time, which the tests of pictures take
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a preloaded module runs as __main__
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
