"""The process of one reward: how a run starts it, asks it and ends it.

It is a new interpreter, because a fork of a process that runs jax may deadlock. It does not import the program that the
user started, as `multiprocessing` would, so it starts in a fraction of a second. Its supervisor ends it with all that it has
started. Nothing that it does, or writes, makes the run wait longer than its timeout.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from jaxlm.core.errors import ConfigError
from jaxlm.reading.decode import choice_name
from jaxlm.systems.rl.rewards.process import AT, FAILED, OPENED, SCORED

if TYPE_CHECKING:
    from jaxlm.core.values.logged import ScoredRows
    from jaxlm.systems.rl.rewards.base import RewardConfig, RewardContext

START_TIMEOUT_S = 300.0  # large libraries from a cold disk
_SEND_S = 300.0  # until a process counts as lost that does not read what it is sent
_EXIT_S = 2.0
_LONGEST_WAIT_S = 1.0  # at a time: the connection of a process that has ended may stay open
_END_S = 10.0
_READ_BYTES, _LONGEST_BYTES = 1 << 20, 1 << 28
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from jaxlm.systems.rl.rewards.supervisor import supervise; supervise(int(sys.argv[3]));"
    "from jaxlm.systems.rl.rewards.process import serve; serve(int(sys.argv[2]))"
)
# The accelerators are the run's: a library that takes one would fail, or take the run's memory.
_NO_ACCELERATOR = {
    "JAX_PLATFORMS": "cpu",
    "PJRT_DEVICE": "CPU",  # of torch_xla
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "-1",
}


class RewardWorker:
    """The process of one reward, as the run sees it. `open` must follow its start."""

    def __init__(self, name: str, config: "RewardConfig", context: "RewardContext", timeout_s: float):
        """Args: timeout_s: how long it may take to score the rows of one `score`."""
        self._label = f"reward '{name}' (type: {choice_name(type(config))})"
        if type(config).__module__ == "__main__":
            raise ConfigError(
                f"{self._label}: its class is in the program itself, which the reward's process does not import. Move it to a"
                " module"
            )
        self._setup = pickle.dumps((config, dataclasses.replace(context, decode=_Decode(context.decode))))
        self._timeout_s = timeout_s
        self._start()

    def _start(self) -> None:
        self._connection, theirs = socket.socketpair()
        paths = json.dumps([path for path in sys.path if isinstance(path, str)])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, paths, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # it ends when this is closed
                stdout=2,  # what a reward prints must not end up in the output of a command
                env=os.environ | _NO_ACCELERATOR,
                start_new_session=True,
            )

    def restart(self) -> bool:
        """Starts the process again if it has ended. Returns whether it did."""
        if self._process.poll() is None:
            return False
        self.close()
        self._start()
        return True

    def open(self) -> tuple[str, ...]:
        """Tells the process which reward it is, and waits until it is open. Returns the columns that it reads."""
        try:
            kind, value = next(self._messages(self._setup, START_TIMEOUT_S, 0, lambda: "while it opened"))
        except TimeoutError:
            raise self._late(f"has not opened within {START_TIMEOUT_S:g} s") from None
        if kind == FAILED:
            self.end()
            raise ConfigError(f"{self._label}: {value[0]}")
        return tuple(value)

    def score(self, rows: "ScoredRows", pickled: bytes) -> list[float]:
        """The scores of rows, NaN for None. Args: pickled: the rows."""
        at: int | None = None

        def during() -> str:
            return f"while it scored {_where(rows, at)}"

        try:
            for kind, value in self._messages(pickled, self._timeout_s, len(rows), during):
                if kind == SCORED:
                    return value
                if kind == FAILED:
                    where = _where(rows, value[1])
                    raise ConfigError(f"{self._label}: {value[0]}, for {where}. Correct the reward")
                at = value
        except TimeoutError:
            pass
        raise self._late(
            f"no result for {_where(rows, at)} within {self._timeout_s:g} s. Make it faster, or raise reward_timeout_s"
        )

    def _messages(
        self, request: bytes, timeout_s: float, size: int, during: Callable[[], str]
    ) -> Iterator[tuple[str, Any]]:
        """Yields what the process says after a request. Raises `TimeoutError` if it says nothing more in time, and
        `ConfigError` if it has ended. Args: size: number of rows. during: for messages.
        """
        deadline, rest = time.monotonic() + timeout_s, b""
        self._connection.settimeout(min(_SEND_S, timeout_s))
        try:
            self._connection.sendall(request)
        except TimeoutError:  # it was stopped, or a thread that the reward has left behind does not let it read
            deadline = time.monotonic()
        except OSError:  # it has ended: reading says so
            pass
        while True:
            left_s = deadline - time.monotonic()
            if wait([self._connection], min(max(left_s, 0.0), _LONGEST_WAIT_S)):
                *lines, rest = (rest + self._received(during)).split(b"\n")
                for line in lines:
                    yield self._message(line, size, during)
                if len(rest) > _LONGEST_BYTES:
                    raise self._strange(during)
            # Without a supervisor of sessions (not on Linux), a program that it has started may hold its connection open.
            elif self._process.poll() is not None:
                raise self._ended(during)
            if left_s <= 0:
                raise TimeoutError

    def _received(self, during: Callable[[], str]) -> bytes:
        with contextlib.suppress(OSError):
            if data := self._connection.recv(_READ_BYTES):
                return data
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)  # the connection closes a moment before the process has ended
        raise self._ended(during)

    def _message(self, line: bytes, size: int, during: Callable[[], str]) -> tuple[str, Any]:
        try:
            match json.loads(line):
                case [str() as kind, list() as value] if kind == OPENED or (kind == SCORED and len(value) == size):
                    return kind, value
                case [str() as kind, int() as value] if kind == AT and 0 <= value < size:
                    return kind, value
                case [str() as kind, [str(), int() | None] as value] if kind == FAILED:
                    return kind, value
        except (ValueError, RecursionError):
            pass  # it is not JSON
        raise self._strange(during)

    def _strange(self, during: Callable[[], str]) -> ConfigError:
        """Ends a process that has written something that is not a message."""
        self.end()
        return ConfigError(
            f"{self._label}: something other than its own process wrote to the connection with the run {during()}. Look for a"
            " library that writes to descriptors which it has not opened"
        )

    def _ended(self, during: Callable[[], str]) -> ConfigError:
        code = self.end()
        how = f"the signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        return ConfigError(
            f"{self._label}: its process ended with {how} {during()}. Look for a lack of memory, a crash of a library, or a"
            " call that exits"
        )

    def _late(self, what: str) -> ConfigError:
        """Ends the process. Args: what: it has not done in time."""
        self.end()
        return ConfigError(f"{self._label}: {what}. Its process has been ended")

    def close(self) -> None:
        """Ends the process. It exits by itself when its connection closes, unless it is busy."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self.end()

    def end(self) -> int:
        """Ends the process and what it has started, also while another thread waits for it. Returns its exit code, negative
        for a signal.
        """
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it was stopped, or waits for one that the system does not end
            self._process.kill()  # which ends the worker too
        return self._process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time signals, only two have names
        return str(number)


def _where(rows: "ScoredRows", number: int | None) -> str:
    """A row for messages: where its record is, and how the completion begins. All rows, if the number is None."""
    if number is None:
        return f"the {len(rows.places)} completions of {rows.places[0]} to {rows.places[-1]}"
    return f"{rows.places[number]} (completion {json.dumps(rows.completions[number][:80], ensure_ascii=False)})"


class _Decode:
    """A function that reaches another process as bytes, which are only read if the reward calls it: tokenizers are large."""

    def __init__(self, function: Callable[[Sequence[int]], str]):
        self._pickled: bytes | None = None
        self._function: Callable[[Sequence[int]], str] | None = None
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            self._pickled = pickle.dumps(function)

    def __call__(self, ids: Sequence[int]) -> str:
        if self._function is None:
            if self._pickled is None:
                raise ConfigError(
                    "`decode` is a function that cannot be sent to another process. Decode with a tokenizer"
                )
            self._function = pickle.loads(self._pickled)
        assert self._function is not None, "it was pickled"
        return self._function(ids)
