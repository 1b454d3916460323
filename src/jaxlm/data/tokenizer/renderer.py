"""Renders chat templates in a process of their own: see `rendering`."""

import atexit
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer.rendering import INVALID, SYNTAX, TEXT, TOO_LARGE, Job, Limits

LIMITS = Limits()
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from jaxlm.data.tokenizer.rendering import serve; serve(int(sys.argv[2]))"
)
_EXIT_S = 2.0


class RenderingError(Exception):
    """What a template does instead of rendering, as the rest of a sentence about it."""


class UnsuitableTextError(Exception):
    """What is wrong with a conversation for any template, as a sentence."""


class Renderer:
    """The process, started for the first template and again if a template has ended it. It ends with this one."""

    def __init__(self):
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, job: Job) -> list[str]:
        """The texts of a job.

        Raises:
            RenderingError: whatever the template does instead, or needs more of than `LIMITS`.
            UnsuitableTextError: the conversation has characters that mark what the template generates.
        """
        try:
            request = pickle.dumps((LIMITS, job))
        except RecursionError:
            raise RenderingError(" cannot render this conversation, because it is nested too deeply") from None
        with self._lock:
            try:
                texts, (kind, content) = self._ask_again_if_killed(request, max(1, len(job.until)))
            except BaseException:
                self.end()  # what it still sends must not answer the next job
                raise
        if kind == TEXT:
            return texts
        if kind == INVALID:
            raise UnsuitableTextError(content)
        does = " rejects this conversation: " if job.until else " cannot be compiled: "
        raise RenderingError({SYNTAX: ", ", TOO_LARGE: " needs "}.get(kind, does) + content)

    def _ask_again_if_killed(self, request: bytes, number: int) -> tuple[list[str], tuple[bytes, str]]:
        """Like `_ask`. A template cannot send itself SIGKILL: somebody else did, such as the system when memory ran out."""
        for is_last in (False, True):
            try:
                return self._ask(request, number)
            except (EOFError, OSError):
                code = self.end()
                if is_last or code != -signal.SIGKILL:
                    raise RenderingError(_how_it_died(code)) from None
        raise AssertionError("unreachable")

    def _ask(self, request: bytes, number: int) -> tuple[list[str], tuple[bytes, str]]:
        """The texts, and the kind and the content of the last message."""
        connection, texts = self._connection or self._start(), []
        connection.send_bytes(request)
        for _ in range(number):
            message = connection.recv_bytes()
            kind, content = message[:1], message[1:].decode("utf-8")
            texts.append(content)
            if kind != TEXT:  # the last one of the job
                return texts, (kind, content)
        return texts, (TEXT, "")

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        paths = json.dumps([path for path in sys.path if isinstance(path, str)])
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _CODE, paths, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise ConfigError(
                    f"the process that renders chat templates cannot be started ({error.strerror}). Free memory or processes"
                ) from error
        self._connection = Connection(ours.detach())
        return self._connection

    def end(self) -> int | None:
        """Ends the process. Returns its exit code; None if there was none."""
        connection, process = self._connection, self._process
        self._connection = self._process = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        try:
            return process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def forget(self) -> None:
        """In a fork of this process: leaves the process to the parent."""
        if self._connection is not None:
            self._connection.close()
        self._lock, self._connection, self._process = threading.Lock(), None, None


def _how_it_died(code: int | None) -> str:
    if code == -signal.SIGPROF:
        return f" takes more than {LIMITS.cpu_s:g} s of a CPU to render this conversation"
    how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
    return f" ended the process that rendered this conversation ({how})"


RENDERER = Renderer()
atexit.register(RENDERER.end)
os.register_at_fork(after_in_child=RENDERER.forget)
