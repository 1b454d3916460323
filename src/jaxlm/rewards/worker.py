"""The process of one reward: how a run starts it, asks it and ends it, and what happens in it.

It is a new interpreter, because a fork of a process that runs jax may deadlock. It does not import the program that the
user started, as `multiprocessing` would, so it starts in a fraction of a second. It leads a session of its own: ending it
also ends the programs that the reward has started, and Ctrl-C in a terminal reaches only the run.
"""

import contextlib
import dataclasses
import json
import math
import numbers
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from jaxlm.config.decode import choice_name
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import is_float32

if TYPE_CHECKING:
    from jaxlm.rewards.base import Reward, RewardConfig, RewardContext, ScoredRows

START_TIMEOUT_S = 300.0  # large libraries from a cold disk
_SEND_S = 300  # until a process counts as lost that does not read what it is sent
_EXIT_S = 2.0
_PARENT_S = 1.0
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from jaxlm.rewards.worker import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)
# The accelerators are the run's: a library that takes one would fail, or take the run's memory.
_NO_ACCELERATOR = {
    "JAX_PLATFORMS": "cpu",
    "PJRT_DEVICE": "CPU",  # of torch_xla
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "-1",
}
_OPENED, _AT, _SCORED, _FAILED = "opened", "at", "scored", "failed"


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
        self._connection, theirs = _connections()
        paths = json.dumps([path for path in sys.path if isinstance(path, str)])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, paths, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints must not end up in the output of a command
                env=os.environ | _NO_ACCELERATOR,
                start_new_session=True,
            )
        self._is_open = self._has_ended = False

    def set_up(self) -> None:
        """Tells the process which reward it is. Waits until it has started."""
        with contextlib.suppress(OSError):  # it has ended: `opened` says so
            self._connection.send_bytes(self._setup)

    def opened(self) -> tuple[str, ...]:
        """Waits until the reward is open. Returns the columns that it reads."""
        if not self._connection.poll(START_TIMEOUT_S):
            raise self._late(f"has not opened within {START_TIMEOUT_S:g} s")
        kind, value = self._next("while it opened")
        if kind == _FAILED:
            self.end()
            raise ConfigError(f"{self._label}: {value[0]}")
        self._is_open = True
        return value

    def restart(self) -> bool:
        """Starts the process again if it has ended. Returns whether it did."""
        if not self._has_ended and self._process.poll() is None:
            return False
        self.end()
        self._start()
        return True

    def send(self, rows: "ScoredRows", pickled: bytes) -> None:
        """Begins to score rows. `receive` must follow until it returns the scores. Args: pickled: the rows."""
        self._rows, self._at, timeout_s = rows, None, self._timeout_s
        try:
            self._connection.send_bytes(pickled)
        except BlockingIOError:  # it was stopped, or a thread that the reward has left behind does not let it read
            timeout_s = 0.0
        except OSError:  # it has ended: `receive` says so
            pass
        self._deadline = time.monotonic() + timeout_s

    @property
    def connection(self) -> Connection:
        """Has something to read when `receive` has."""
        return self._connection

    @property
    def seconds_left(self) -> float:
        """Until the rows given to `send` have to be scored."""
        return self._deadline - time.monotonic()

    def receive(self) -> list[float] | None:
        """Reads one message of the process. Returns the scores of the rows given to `send`, NaN for None, if it has them."""
        assert self._rows is not None, "send comes first"
        kind, value = self._next(f"while it scored {_where(self._rows, self._at)}")
        if kind == _AT:
            self._at = value
            return None
        rows, self._rows = self._rows, None
        if kind == _FAILED:
            where = _where(rows, value[1])
            raise ConfigError(f"{self._label}: {value[0]}, for {where}. Correct the reward")
        return value

    @property
    def is_busy(self) -> bool:
        """Whether it has not answered the last `send`."""
        return self._rows is not None

    def check_in_time(self) -> None:
        """Raises `ConfigError` if the process has ended, or has no time left for the rows given to `send`, which ends it."""
        assert self._rows is not None, "send comes first"
        where = _where(self._rows, self._at)
        # A program that it has started may hold its connection open.
        if self._process.poll() is not None and not self._connection.poll():
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

    def _next(self, during: str) -> tuple[str, Any]:
        """The next message of the process."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)  # the connection closes a moment before the process has ended
            raise self._ended(during) from None

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
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its group outlives it, if it has started something
        self._connection.close()
        return self._process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time signals, only two have names
        return str(number)


def _connections() -> tuple[Connection, Connection]:
    """Both ends of a connection. Sending at the first one raises `BlockingIOError` when nothing is read for long."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
    return Connection(ours.detach()), Connection(theirs.detach())


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


def serve(descriptor: int, run: int) -> None:
    """What the process does: opens the reward, and scores rows until the run closes the connection.

    Args:
        descriptor: of the connection.
        run: process id of the run.
    """
    # SLURM and others signal every process of a job. The run saves then, and ends this one. Programs that a reward starts do
    # not inherit a handler, only what is ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_end_after, args=(run,), daemon=True).start()
    connection = Connection(descriptor)
    try:
        config, context = pickle.loads(connection.recv_bytes())
        reward: Reward = config.open(context)
        connection.send((_OPENED, tuple(reward.columns)))
    except BaseException as error:  # a reward's own module can raise anything, SystemExit too
        connection.send((_FAILED, (_description(error), None)))
        return
    with contextlib.suppress(EOFError, OSError):  # the run has closed the connection, or has ended
        own = os.getpid()
        while True:
            rows = connection.recv()
            answer = _answer(reward, rows, lambda number: connection.send((_AT, number)))
            if os.getpid() != own:
                os._exit(0)  # a fork of the reward, whose answer would be taken for that of the next rows
            connection.send(answer)


def _end_after(run: int) -> None:
    """Ends this process when the run has been killed: a reward that hangs would otherwise stay forever."""
    while os.getppid() == run:
        time.sleep(_PARENT_S)
    os.killpg(0, signal.SIGKILL)


def _answer(reward: "Reward", rows: "ScoredRows", begin: Callable[[int], None]) -> tuple[str, Any]:
    """The message that answers rows: their scores, or what is wrong and with which row. Calls `begin` for each row."""
    scores: list[float] = []
    parts = [(None, rows)] if not reward.scores_alone else [(number, rows.row(number)) for number in range(len(rows))]
    for number, part in parts:
        if number is not None:
            begin(number)
        try:
            scores += _scores(reward.score(part), len(part), number or 0)
        except _WrongScoreError as error:
            return _FAILED, (str(error), number if error.place is None else error.place)
        except BaseException as error:  # a reward and what it returns can raise anything, SystemExit too
            return _FAILED, (_description(error), number)
    return _SCORED, scores


class _WrongScoreError(Exception):
    """What a reward returned is not what was expected. Attributes: place: the number of the row; None for all."""

    def __init__(self, message: str, place: int | None):
        super().__init__(message)
        self.place = place


def _scores(given: Any, expected: int, first: int) -> list[float]:
    """The scores of rows. Args: expected: number of rows; first: number of the first one."""
    if isinstance(given, (str, bytes, Mapping, Set)) or not hasattr(given, "__len__") or len(given) != expected:
        what = f"{len(given)} values" if isinstance(given, (list, tuple)) else f"{type(given).__name__} {given!r:.60}"
        raise _WrongScoreError(f"it returned {what}, but a list of {expected} numbers was expected", None)
    scores: list[float] = []
    for place, value in enumerate(given, start=first):
        try:
            scores.append(_number(value))
        except ValueError:
            what = "a finite number expected, or None where the reward does not apply"
            raise _WrongScoreError(f"it returned {value!r:.60}, {what}", place) from None
    return scores


def _number(value: Any) -> float:
    """One score, NaN for None. Raises `ValueError` if it is neither None nor a finite number."""
    if value is None:
        return math.nan
    item = value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value  # of numpy or torch
    if not isinstance(item, numbers.Real) or not is_float32(item):
        raise ValueError
    return float(item)


def _description(error: BaseException) -> str:
    """An error in one line, with the place in the user's code."""
    if isinstance(error, ConfigError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    known = (*libraries, os.path.dirname(__file__), "<")
    own = [frame for frame in frames if not frame.filename.startswith(known)]
    place = f" in {own[-1].filename}, line {own[-1].lineno}" if own else ""
    try:
        what = " ".join(str(error).split())[:500]
    except BaseException:
        what = "an error that has no text"
    return f"it raised {type(error).__name__}: {what}{place}"
