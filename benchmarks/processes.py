"""Shared by the benchmarks: processes that print JSON, once or on request, and summarizing their results."""

import contextlib
import json
import select
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class PeerFailedError(Exception):
    """A process ended without an answer."""


def answer_of(command: Sequence[str | Path], *, timeout_s: float | None = None) -> dict:
    """Runs a process and parses the last line it prints as JSON.

    Raises:
        PeerFailedError: the process failed or timed out.
    """
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise PeerFailedError(f"timed out after {timeout_s:.0f} s") from error
    if process.returncode:
        raise PeerFailedError(shortened(process.stderr or process.stdout))
    return json.loads(process.stdout.strip().splitlines()[-1])


class AnsweringProcess:
    """A process that answers each request, a line on its standard input, with a line of JSON on its standard output.

    It waits between requests. It ends when its standard input is closed.
    """

    def __init__(
        self, command: Sequence[str | Path], *, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ):
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # until it ends
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=cwd,
            env=environment,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: str, *, timeout_s: float) -> dict[str, Any]:
        """Sends a request and waits for the answer.

        Raises:
            PeerFailedError: the process ended or did not answer in time.
        """
        assert self._process.stdin is not None
        try:
            print(request, file=self._process.stdin, flush=True)
        except OSError as error:
            raise PeerFailedError(self._why_it_ended()) from error
        return self.answer(timeout_s=timeout_s)

    def answer(self, *, timeout_s: float) -> dict[str, Any]:
        """Waits for an answer, also for the first one, which needs no request. Raises as `ask` does."""
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], timeout_s)[
            0
        ]:  # an answer is one line, so nothing of it is in the buffer
            raise PeerFailedError(f"no answer after {timeout_s:.0f} s\n{self._printed()}")
        line = output.readline()
        try:
            return json.loads(line)
        except ValueError as error:
            raise PeerFailedError(self._why_it_ended() if not line else f"{line}\n{self._printed()}") from error

    def end(self, *, timeout_s: float = 20) -> None:
        """Lets the process end, and kills it if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _why_it_ended(self) -> str:
        deadline = time.monotonic() + 5
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return f"exit code {self._process.poll()}\n{self._printed()}"

    def _printed(self) -> str:
        self._errors.seek(0)
        return shortened(self._errors.read())


def shortened(text: str, *, limit: int = 4000) -> str:
    """The beginning and the end of a long text. A GPU's error comes first, followed by hundreds of its consequences."""
    return text if len(text) <= 2 * limit else f"{text[:limit]}\n[...]\n{text[-limit:]}"


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and third quartile. For a single value, that value three times."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    return median, low, high
