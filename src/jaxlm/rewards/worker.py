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
from jaxlm.rewards.process import AT, FAILED, OPENED, SCORED

if TYPE_CHECKING:
    from jaxlm.rewards.base import RewardConfig, RewardContext, ScoredRows

START_TIMEOUT_S = 300.0  # large libraries from a cold disk
_SEND_S = 300.0  # until a process counts as lost that does not read what it is sent
_EXIT_S = 2.0
_END_S = 10.0
_READ_BYTES, _LONGEST_BYTES = 1 << 20, 1 << 28
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from jaxlm.rewards.supervisor import supervise; supervise(int(sys.argv[3]));"
    "from jaxlm.rewards.process import serve; serve(int(sys.argv[2]))"
)
# The accelerators are the run's: a library that takes one would fail, or take the run's memory.
_NO_ACCELERATOR = {
    "JAX_PLATFORMS": "cpu",
    "PJRT_DEVICE": "CPU",  # of torch_xla
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "-1",
}


class RewardWorker:
    """The process of one reward, as the run sees it. `set_up` and `opened` must follow its start."""

    def __init__(self, name: str, config: "RewardConfig", context: "RewardContext", timeout_s: float):
        """Args: timeout_s: how long it may take to score the rows of one `send`."""
        self._label = f"reward '{name}' (type: {choice_name(type(config))})"
        self._setup = _pickled_setup(self._label, config, context)
        self._timeout_s, self._deadline = timeout_s, 0.0
        self._rows: ScoredRows | None = None
        self._at: int | None = None
        self._start()

    def _start(self) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(START_TIMEOUT_S)
        self._rest = b""
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
        self._is_open = self._has_ended = False

    def set_up(self) -> None:
        """Tells the process which reward it is. Waits until it has started."""
        with contextlib.suppress(OSError):  # it has ended: `opened` says so
            self._connection.sendall(self._setup)

    def opened(self) -> tuple[str, ...]:
        """Waits until the reward is open. Returns the columns that it reads."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while wait([self._connection], max(deadline - time.monotonic(), 0.0)):
            for kind, value in self._messages("while it opened"):
                if kind == FAILED:
                    self.end()
                    raise ConfigError(f"{self._label}: {value[0]}")
                self._is_open = True
                return tuple(value)
        raise self._late(f"has not opened within {START_TIMEOUT_S:g} s")

    def restart(self) -> bool:
        """Starts the process again if it has ended. Returns whether it did."""
        if not self._has_ended and self._process.poll() is None:
            return False
        self.end()
        self._start()
        return True

    def send(self, rows: "ScoredRows", pickled: bytes) -> None:
        """Begins to score rows. `receive` must follow until it returns the scores. Args: pickled: the rows."""
        self._rows, self._at, self._deadline = rows, None, time.monotonic() + self._timeout_s
        self._connection.settimeout(min(_SEND_S, self._timeout_s))
        try:
            self._connection.sendall(pickled)
        except TimeoutError:  # it was stopped, or a thread that the reward has left behind does not let it read
            self._deadline = time.monotonic()
        except OSError:  # it has ended: `receive` says so
            pass

    @property
    def connection(self) -> socket.socket:
        """Has something to read when `receive` has."""
        return self._connection

    @property
    def seconds_left(self) -> float:
        """Until the rows given to `send` have to be scored."""
        return self._deadline - time.monotonic()

    def receive(self) -> list[float] | None:
        """Reads what the process has said. Returns the scores of the rows given to `send`, NaN for None, if it has them."""
        assert self._rows is not None, "send comes first"
        for kind, value in self._messages(f"while it scored {_where(self._rows, self._at)}"):
            if kind == AT:
                self._at = value
                continue
            rows, self._rows = self._rows, None
            if kind == FAILED:
                where = _where(rows, value[1])
                raise ConfigError(f"{self._label}: {value[0]}, for {where}. Correct the reward")
            return value
        return None

    @property
    def is_busy(self) -> bool:
        """Whether it has not answered the last `send`."""
        return self._rows is not None

    def check_in_time(self) -> None:
        """Raises `ConfigError` if the process has ended, or has no time left for the rows given to `send`, which ends it."""
        assert self._rows is not None, "send comes first"
        where = _where(self._rows, self._at)
        # Without a supervisor of sessions (not on Linux), a program that it has started may hold its connection open.
        if self._process.poll() is not None and not wait([self._connection], 0):
            raise self._ended(f"while it scored {where}")
        if self.seconds_left <= 0:
            raise self._late(
                f"no result for {where} within {self._timeout_s:g} s. Make it faster, or raise reward_timeout_s"
            )

    def close(self) -> None:
        """Ends the process. It exits by itself when its connection closes, unless it is busy."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S if self._is_open else 0.0)
        self.end()

    def _messages(self, during: str) -> Iterator[tuple[str, Any]]:
        """The messages that have arrived. Call it when the connection has something to read: it does not wait."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except OSError:
            data = b""
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)  # the connection closes a moment before the process has ended
            raise self._ended(during)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_BYTES:
            raise self._strange(during)
        for line in lines:
            yield self._message(line, during)

    def _message(self, line: bytes, during: str) -> tuple[str, Any]:
        size = 0 if self._rows is None else len(self._rows)
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

    def _strange(self, during: str) -> ConfigError:
        """Ends a process that has written something that is not a message."""
        self.end()
        return ConfigError(
            f"{self._label}: something other than its own process wrote to the connection with the run {during}. Look for a"
            " library that writes to descriptors which it has not opened"
        )

    def _ended(self, during: str) -> ConfigError:
        """Ends what is left of a process that has ended."""
        code = self.end()
        how = f"the signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        return ConfigError(
            f"{self._label}: its process ended with {how} {during}. Look for a lack of memory, a crash of a library, or a"
            " call that exits"
        )

    def _late(self, what: str) -> ConfigError:
        """Ends the process. Args: what: it has not done in time."""
        self.end()
        return ConfigError(f"{self._label}: {what}. Its process has been ended")

    def end(self) -> int:
        """Ends the process and what it has started. Returns its exit code, negative for a signal."""
        if self._has_ended:  # its number may be that of another process by now
            return self._process.wait()
        self._has_ended = True
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it was stopped, or waits for one that the system does not end
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # which ends the worker too
        self._connection.close()
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


def _pickled_setup(label: str, config: "RewardConfig", context: "RewardContext") -> bytes:
    if type(config).__module__ == "__main__":
        raise ConfigError(
            f"{label}: its class is in the program itself, which the reward's process does not import. Move it to a module"
        )
    return pickle.dumps((config, dataclasses.replace(context, decode=_Decode(context.decode))))


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
