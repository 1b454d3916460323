"""The goodput ledger: what each second of a run's wall time was spent on, over all of its starts.

`goodput.jsonl` in the log folder has a line for each start and each save after it: how long the process had spent on each
activity when it saved. The last line is rewritten about once a second, so that a killed run loses no more than that. Steps
that are trained again, by a later start or because the run went back, are lost work.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm.core.errors import counted
from jaxlm.core.safe_io import read_bytes
from jaxlm.core.values.logged import GOODPUT, Activity
from jaxlm.engine.activity import ActivityClock
from jaxlm.observe.records import LEDGER

if TYPE_CHECKING:
    from jaxlm.core.values.logged import StepInfo

IDLE, LOST = "idle between starts", "lost work"
# What is lost when steps are trained again.
_REPEATED = (Activity.DATA, Activity.ROLLOUT, Activity.STEP, Activity.BRANCH, Activity.EVAL)
_TRAINING = (Activity.ANNOTATION, Activity.ROLLOUT, Activity.STEP)  # in which training makes progress
_NEWER = (Activity.ANNOTATION, Activity.ROLLOUT, Activity.BRANCH)  # lines of older versions do not have them
_LINE_BYTES = 512  # every line has this length, so that rewriting one is a single write
_INTERVAL_S = 1.0
_LARGEST = 1e15  # of the numbers in a line


@dataclass(frozen=True)
class Goodput:
    """Describes what a run's wall time was spent on.

    Attributes:
        wall_s: from the start of the first process to the last line of the last one, without the time for which the machine
            slept.
        seconds: activity -> seconds, with `IDLE` and `LOST`; together, `wall_s`.
        num_starts: number of processes that have opened the run, one after another.
    """

    wall_s: float
    seconds: Mapping[str, float]
    num_starts: int

    @property
    def fraction(self) -> float:
        """Share of the wall time in which training made progress that was kept."""
        return sum(self.seconds[name] for name in _TRAINING) / self.wall_s if self.wall_s else 0.0

    def rows(self) -> list[tuple[str, str]]:
        """Rows of a report: the share of each activity that took any time."""
        shares = {name: seconds / self.wall_s for name, seconds in self.seconds.items() if seconds > 0}
        listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        return [("wall time", f"{self.wall_s:.1f} s in {counted(self.num_starts, 'start')}: {listed}")]


class Ledger:
    """Writes the ledger of one process of a run. Only for process 0."""

    def __init__(self, folder: Path, clock: ActivityClock, step: int, warn: Callable[[str], None]):
        """Args:
        folder: the run's log folder.
        step: the step that the process starts from.
        warn: told if the file cannot be written, and when it can be again. Training goes on.
        """
        self._path = folder / LEDGER
        self._clock = clock
        self._warn = warn
        self._step = step
        self._stretch = {"number": 0, "from_step": step}
        self._written = -_INTERVAL_S
        self._failing = False
        self._offset: int | None = None
        self._lines_before = read_lines(folder)
        self._began_unix_s, self._kept_before_s = self._totals_before()

    def __call__(self, info: "StepInfo") -> None:
        self._step = info.step
        if time.monotonic() - self._written >= _INTERVAL_S:
            self.write()

    def metrics(self) -> dict[str, float]:
        """The share of the run's wall time, since its first start, in which training made progress that is kept."""
        seconds = self._clock.seconds()
        kept = self._kept_before_s + sum(seconds[name] for name in _TRAINING)
        wall_s = self._clock.started_unix_s + self._clock.elapsed_s() - self._began_unix_s
        return {GOODPUT: kept / max(wall_s, 1e-9)}

    def begin_attempt(self, step: int) -> None:
        """The run went back to `step` and goes on from there."""
        self.begin_line()
        self._step = step
        self._stretch = {"number": self._stretch["number"] + 1, "from_step": step}
        self.write()
        self._began_unix_s, self._kept_before_s = self._totals_before()

    def begin_line(self) -> None:
        """Begins a new line, because the current step is saved. The line before stays as it is now."""
        self.write()
        if self._offset is not None:
            self._lines_before.append(self._record())
        self._offset = None

    def write(self) -> None:
        """Writes the current line."""
        line = json.dumps(self._record()).ljust(_LINE_BYTES - 1).encode() + b"\n"
        self._written = time.monotonic()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                if self._offset is None:  # after the whole lines: a truncated one must not damage the next
                    self._offset = os.fstat(file).st_size // _LINE_BYTES * _LINE_BYTES
                os.pwrite(file, line, self._offset)
            finally:
                os.close(file)
        except OSError as error:
            if not self._failing:
                self._warn(f"warning: {self._path} cannot be written ({error.strerror}); training goes on")
            self._failing = True
        else:
            if self._failing:
                self._warn(f"{self._path} is written again")
            self._failing = False

    def _record(self) -> dict[str, Any]:
        return {
            "started_unix_s": round(self._clock.started_unix_s, 3),
            "stretch": self._stretch,
            "step": self._step,
            "elapsed_s": round(self._clock.elapsed_s(), 3),
            "seconds": {name: round(seconds, 3) for name, seconds in self._clock.seconds().items()},
        }

    def _totals_before(self) -> tuple[float, float]:
        """Returns when the run began, and the seconds that earlier processes spent on steps that are kept."""
        now = self._record()
        goodput = account([*self._lines_before, now])
        assert goodput is not None
        first = self._lines_before[0] if self._lines_before else now
        return first["started_unix_s"], sum(goodput.seconds[name] - now["seconds"][name] for name in _TRAINING)


def read_lines(folder: Path) -> list[Mapping[str, Any]]:
    """The undamaged lines of a ledger; empty if the log folder has none."""
    try:
        return parse_lines(read_bytes(folder / LEDGER))[0]
    except OSError:
        return []


def parse_lines(content: bytes) -> tuple[list[Mapping[str, Any]], int]:
    """The undamaged lines of a ledger's file, and the number of damaged ones. Lines are where they were written, whatever is
    between them. An incomplete last line is not counted.
    """
    blocks = [content[start : start + _LINE_BYTES] for start in range(0, len(content), _LINE_BYTES)]
    parsed = [(block, _parsed(block)) for block in blocks]
    lines = [line for _, line in parsed if line is not None]
    return lines, sum(line is None and len(block) == _LINE_BYTES for block, line in parsed)


def account(lines: Sequence[Mapping[str, Any]]) -> Goodput | None:
    """The goodput from a ledger's lines in the order of writing; None if there are none."""
    if not lines:
        return None
    processes: dict[float, Mapping[str, Any]] = {}  # when each one started -> its last line
    for line in lines:
        processes[line["started_unix_s"]] = line
    seconds: dict[str, float] = dict.fromkeys((*Activity, LOST, IDLE), 0.0)
    end = min(processes)
    for started, last in sorted(processes.items()):
        seconds[IDLE] += max(0.0, started - end)
        end = max(end, started + last["elapsed_s"])
        for name in Activity:
            seconds[name] += last["seconds"][name]
    for name, spent in _repeated(lines):
        seconds[name] -= spent
        seconds[LOST] += spent
    return Goodput(sum(seconds.values()), seconds, len(processes))


def _repeated(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """(activity, seconds) of steps that were trained again later."""
    repeated = []
    kept: list[tuple[int, dict[str, float]]] = []  # (step, seconds of each activity since the entry before)
    newest: dict[float, Mapping[str, Any]] = {}  # when a process started -> its previous line
    for line in lines:
        before = newest.get(line["started_unix_s"])
        if before is None or line["stretch"] != before["stretch"]:
            while kept and kept[-1][0] > line["stretch"]["from_step"]:
                repeated += kept.pop()[1].items()
        earlier = dict.fromkeys(_REPEATED, 0.0) if before is None else before["seconds"]
        kept.append((line["step"], {name: line["seconds"][name] - earlier[name] for name in _REPEATED}))
        newest[line["started_unix_s"]] = line
    return repeated


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    """A line of the ledger; None if it is damaged."""
    try:
        record = json.loads(line)
        for activity in _NEWER:
            record["seconds"].setdefault(activity, 0.0)
        numbers = [record["started_unix_s"], record["stretch"]["from_step"], record["step"], record["elapsed_s"]]
        numbers += [record["seconds"][name] for name in Activity]
        is_sound = all(type(number) in (int, float) and 0 <= number < _LARGEST for number in numbers)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return record if is_sound else None
