"""What stands between a tracker that may fail or hang, and the run that must not notice."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxlm.core.types import Histogram
from jaxlm.observe.trackers.base import Tracker

_Job = Callable[[Tracker], None]


@dataclass(frozen=True)
class TrackerTimeouts:
    """How long a run waits for a tracker, and a tracker for records.

    Attributes:
        gather_s: between two looks into the queue. Being woken for a single record costs more than the record does.
        max_waiting: records that may wait; one more, and the tracker is given up.
        flush_s: before a save; it is waited for once in vain and then no more.
        close_s: at the end of the run.
    """

    gather_s: float = 1.0
    max_waiting: int = 10_000
    flush_s: float = 5.0
    close_s: float = 60.0


class BackgroundTracker:
    """A tracker in a thread of its own: handing it a record takes microseconds, whatever becomes of it.

    The thread sleeps while records gather, and wakes by itself or before its time for a flush and for the end.
    It is opened there as well. The first failure of any kind, a queue that runs full, or an end that does not come, is
    said once on the console and ends this tracker; the run and the other trackers go on.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        log: Callable[[str], None],
        patience: TrackerTimeouts | None = None,
    ):
        """Args: name: for people. open_tracker: called in the thread. show: prints a line, in the caller's own thread."""
        self._name = name
        self._open = open_tracker
        self._show = log
        self._patience = patience or TrackerTimeouts()
        self._jobs: deque[_Job | None] = deque()
        self._changed = threading.Condition()
        self._opened = self._ended = self._given_up = self._in_hurry = False
        self._failure: BaseException | None = None
        self._num_given = self._num_done = 0
        self._waits = True
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Puts the record into the queue."""
        self._give(lambda tracker: tracker.log(step, metrics))

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """The same for histograms."""
        self._give(lambda tracker: tracker.log_histograms(step, histograms))

    def flush(self) -> None:
        """Waits a moment for what is in the queue; not at all before the tracker is open, or once it was too slow."""
        target = self._give(lambda tracker: tracker.flush(), in_hurry=True)
        if self._given_up or not self._opened or not self._waits:
            return
        with self._changed:
            done = lambda: self._num_done >= target or self._ended  # noqa: E731
            self._waits = self._changed.wait_for(done, self._patience.flush_s)
        if not self._waits:
            self._say(f"has not kept up within {self._patience.flush_s:g} s; saving no longer waits for it")
        self._look()

    def close(self) -> None:
        """Waits for the rest of the queue and for the tracker's own end, as long as patience lasts."""
        if self._given_up:
            return
        self._give(None, in_hurry=True)
        if self._given_up:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._ended, self._patience.close_s)
        if not self._ended:
            self._give_up(
                f"has not finished within {self._patience.close_s:g} s; what it had not written is lost to it"
            )
        self._look()

    def _give(self, job: _Job | None, *, in_hurry: bool = False) -> int:
        """Queues a job and returns its number. Args: in_hurry: wakes the thread for it."""
        self._look()
        if self._given_up:
            return 0
        with self._changed:
            if full := len(self._jobs) >= self._patience.max_waiting:
                self._jobs.clear()
            else:
                self._jobs.append(job)
                self._num_given += 1
            if in_hurry:
                self._in_hurry = True
                self._changed.notify_all()
        if full:
            self._give_up(f"is {self._patience.max_waiting} records behind; the run goes on without it")
        return self._num_given

    def _look(self) -> None:
        """Says, in the run's own thread, that the tracker has failed."""
        if self._failure is not None and not self._given_up:
            reason = str(self._failure).strip().splitlines() or [""]
            self._give_up(f"failed ({type(self._failure).__name__}: {reason[0]}); the run goes on without it")

    def _give_up(self, problem: str) -> None:
        self._given_up = True
        self._say(problem)

    def _say(self, problem: str) -> None:
        self._show(f"tracker {self._name} {problem}. metrics.jsonl has everything")

    def _work(self) -> None:
        try:
            tracker = self._open()
            self._opened = True
            while (job := self._next()) is not None:
                job(tracker)
                with self._changed:
                    self._num_done += 1
                    self._changed.notify_all()
            tracker.close()
        # Anything at all: it is somebody else's code, and its failure must not become the run's.
        except (Exception, SystemExit) as failure:
            self._failure = failure
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._jobs:
                self._in_hurry = False
                self._changed.wait_for(lambda: self._in_hurry, self._patience.gather_s)
            return self._jobs.popleft()
