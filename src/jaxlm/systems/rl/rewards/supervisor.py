"""A process that ends with all that it has started, programs in sessions of their own too.

Linux gives a process whose parent has ended to the nearest subreaper above it. The supervisor is one: when a process below it
ends, its children become the supervisor's. Killing children until there are none leaves no descendant. It runs no code of a
reward, and imports only the standard library, so that it may fork.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PARENT_S = 1.0
_ROUND_S = 0.01
_ENDED_BY_RUN = 1


def supervise(run: int) -> None:
    """Forks. Returns in the new process, the worker, whose standard input is empty. The other one never returns: it ends the
    worker and all that it has started when its standard input is at its end, or the process `run` is no longer its parent. If
    the worker has ended by itself, it ends what is left, and then as the worker did.
    """
    # SLURM and others signal every process of a job. The run saves then, and ends this one. Programs that a worker starts do
    # not inherit a handler, only what is ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor, worker = os.getpid(), os.fork()
    if worker == 0:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(_ENDED_BY_RUN)
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
        return
    os.closerange(3, 1 << 16)  # the connection of the worker
    status = _wait(worker, run)
    _end_all(worker)
    _end_as(status)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _wait(worker: int, run: int) -> int | None:
    """The status of the worker when it has ended; None if the supervisor must end it."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write)
    while True:
        status = _reaped(worker)
        if status is not None:
            return status
        ready, _, _ = select.select([sys.stdin.fileno(), read], [], [], _PARENT_S)
        # A fork of the run may hold the other end of the standard input.
        if sys.stdin.fileno() in ready or os.getppid() != run:
            return None
        if read in ready:
            os.read(read, 1 << 16)


def _reaped(worker: int) -> int | None:
    """Reaps children that have ended. Returns the status of the worker if it is one of them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == worker:
                return status
            if ended == 0:
                break
    return None


def _end_all(worker: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)  # where there is no /proc, these are the ones that can be found
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(_ROUND_S)


def _children() -> list[int]:
    parent, children = str(os.getpid()), []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # it has ended
            if path.read_text(errors="replace").rpartition(")")[2].split()[1] == parent:
                children.append(int(path.parent.name))
    return children


def _end_as(status: int | None) -> None:
    """Ends this process with the exit code or the signal of another one."""
    code = _ENDED_BY_RUN if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has written its memory, if it should
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code % 256)
