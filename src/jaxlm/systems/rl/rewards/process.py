"""What happens in the process of a reward: it opens the reward, scores rows, and says what is wrong with them.

The run sends pickles. The answers are lines of JSON, so that the run can tell them from what a reward writes by mistake.
"""

import contextlib
import fcntl
import json
import math
import numbers
import os
import pickle
import socket
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any

from jaxlm.core.errors import ConfigError, shown
from jaxlm.core.field_types import is_float32, what_float32_needs

if TYPE_CHECKING:
    from jaxlm.core.values.logged import ScoredRows
    from jaxlm.systems.rl.rewards.base import Reward

OPENED, AT, SCORED, FAILED = "opened", "at", "scored", "failed"
"""Kinds of answers: columns; the number of the row that is next; scores; what is wrong, and the number of the row."""
_PRIVATE = 512  # descriptors from here on


def serve(descriptor: int) -> None:
    """Opens the reward, and scores rows until the run closes the connection. Args: descriptor: of the connection."""
    connection = socket.socket(fileno=_private(descriptor))
    requests = connection.makefile("rb")

    def send(kind: str, value: Any) -> None:
        connection.sendall(json.dumps([kind, value]).encode() + b"\n")

    with contextlib.suppress(EOFError, OSError):  # the run has closed the connection, or has ended
        try:
            config, context = pickle.load(requests)
            reward: Reward = config.open(context)
            columns = list(reward.columns)
        except BaseException as error:  # a reward's own module can raise anything, SystemExit too
            send(FAILED, (_description(error), None))
            return
        send(OPENED, columns)
        pid = os.getpid()
        while True:
            rows = pickle.load(requests)
            answer = _answer(reward, rows, lambda number: send(AT, number))
            if os.getpid() != pid:
                os._exit(0)  # a fork of the reward, whose answer would be taken for that of the next rows
            send(*answer)


def _private(descriptor: int) -> int:
    """The same connection under a number that no code writes to by mistake, and that programs do not inherit."""
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _PRIVATE)
    except OSError:  # the system allows fewer
        os.set_inheritable(descriptor, False)
        return descriptor
    os.close(descriptor)
    return moved


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
            message, place = error.args
            return FAILED, (message, number if place is None else place)
        except BaseException as error:  # a reward and what it returns can raise anything, SystemExit too
            return FAILED, (_description(error), number)
    return SCORED, scores


class _WrongScoreError(Exception):
    """Says that a reward returned something unexpected. Args: a message, and the number of the row; None for all."""


def _scores(result: Any, expected: int, first: int) -> list[float]:
    """The scores of rows. Args: expected: number of rows; first: number of the first one."""
    if isinstance(result, (str, bytes, Mapping, Set)) or not hasattr(result, "__len__") or len(result) != expected:
        what = (
            f"{len(result)} values" if isinstance(result, (list, tuple)) else f"{type(result).__name__} {result!r:.60}"
        )
        raise _WrongScoreError(f"it returned {what}, but a list of {expected} numbers was expected", None)
    scores: list[float] = []
    for place, value in enumerate(result, start=first):
        is_scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0  # of numpy or torch
        item = value.item() if is_scalar else value
        try:
            scores.append(_number(item))
        except ValueError:
            what = f"{what_float32_needs(item)} expected, or None where the reward does not apply"
            raise _WrongScoreError(f"it returned {shown(value)}, {what}", place) from None
    return scores


def _number(item: Any) -> float:
    """One score, NaN for None. Raises `ValueError` if it is neither None nor a number that float32 can hold."""
    if item is None:
        return math.nan
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
    user_frames = [frame for frame in frames if not frame.filename.startswith(known)]
    place = f" in {user_frames[-1].filename}, line {user_frames[-1].lineno}" if user_frames else ""
    try:
        what = " ".join(str(error).split())[:500]
    except BaseException:
        what = "an error that has no text"
    return f"it raised {type(error).__name__}: {what}{place}"
