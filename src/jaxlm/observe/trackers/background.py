"""Runs a tracker in a background thread, so that its failures and delays do not affect the run."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxlm.core.redaction import redact
from jaxlm.core.values.logged import Completion, Histogram, Sample
from jaxlm.observe.trackers.base import FilesError, Tracker

_Job = Callable[[Tracker], None]


@dataclass(frozen=True)
class TrackerTimeouts:
    """Limits how long the run waits for a tracker, and the tracker's thread for records.

    Attributes:
        gather_s: seconds between the thread's checks of the queue. Waking it for each record costs more than the record.
        max_waiting: maximum length of the queue; if it is exceeded, the tracker is dropped.
        flush_s: seconds to wait before a save. After the first timeout, saves no longer wait.
        close_s: seconds to wait at the end of the run.
    """

    gather_s: float = 1.0
    max_waiting: int = 10_000
    flush_s: float = 5.0
    close_s: float = 60.0


class BackgroundTracker:
    """Runs a tracker in a thread of its own. Logging a record takes microseconds, even if the tracker blocks or fails.

    The thread opens the tracker, then processes the queue at intervals, and at once for a flush or close. On the first
    failure, a full queue or a timeout at the end, a message is logged once and this tracker is dropped. The run and the
    other trackers continue.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        log: Callable[[str], None],
        timeouts: TrackerTimeouts | None = None,
    ):
        """Args: name: used in messages. open_tracker: called in the thread. log: prints a line, in the caller's thread."""
        self._name = name
        self._open = open_tracker
        self._print_line = log
        self._timeouts = timeouts or TrackerTimeouts()
        self._jobs: deque[_Job | None] = deque()
        self._changed = threading.Condition()
        self._opened = self._ended = self._dropped = self._urgent = False
        self._failure: BaseException | None = None
        self._num_queued = self._num_done = 0
        self._flush_waits = True
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._queue(lambda tracker: tracker.log(step, metrics))

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._queue(lambda tracker: tracker.log_histograms(step, histograms))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._queue(lambda tracker: tracker.log_samples(step, redact(samples)))

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        self._queue(lambda tracker: tracker.log_completions(step, redact(completions)))

    def begin_attempt(self, attempt: int, step: int, abandoned_steps: int) -> None:
        self._queue(lambda tracker: tracker.begin_attempt(attempt, step, abandoned_steps))

    def flush(self) -> None:
        """Waits up to `flush_s` for the queue. Does not wait if the tracker is not open yet or has timed out before."""
        target = self._queue(lambda tracker: tracker.flush(), urgent=True)
        if self._dropped or not self._opened or not self._flush_waits:
            return
        with self._changed:
            done = lambda: self._num_done >= target or self._ended  # noqa: E731
            self._flush_waits = self._changed.wait_for(done, self._timeouts.flush_s)
        if not self._flush_waits:
            self._warn(f"has not flushed within {self._timeouts.flush_s:g} s; saves no longer wait for it")
        self._check_failure()

    def close(self) -> None:
        """Waits up to `close_s` for the queue to be processed and the tracker to close."""
        if self._dropped:
            return
        self._queue(None, urgent=True)
        if self._dropped:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._ended, self._timeouts.close_s)
        if not self._ended:
            self._drop(f"has not finished within {self._timeouts.close_s:g} s; records it has not written are lost")
        self._check_failure()

    def _queue(self, job: _Job | None, *, urgent: bool = False) -> int:
        """Queues a job and returns its number. Args: urgent: wake the thread at once."""
        self._check_failure()
        if self._dropped:
            return 0
        with self._changed:
            if full := len(self._jobs) >= self._timeouts.max_waiting:
                self._jobs.clear()
            else:
                self._jobs.append(job)
                self._num_queued += 1
            if urgent:
                self._urgent = True
                self._changed.notify_all()
        if full:
            self._drop(f"is {self._timeouts.max_waiting} records behind; the run continues without it")
        return self._num_queued

    def _check_failure(self) -> None:
        """Logs in the run's thread that the tracker has failed, and drops it."""
        if self._failure is not None and not self._dropped:
            reason = str(self._failure).strip().partition("\n")[0]
            if isinstance(self._failure, FilesError):
                self._drop(f"has all records, but {reason}")
            else:
                self._drop(f"failed ({type(self._failure).__name__}: {reason}); the run continues without it")

    def _drop(self, problem: str) -> None:
        self._dropped = True
        self._warn(problem)

    def _warn(self, problem: str) -> None:
        self._print_line(f"tracker {self._name} {problem}. metrics.jsonl has all metrics")

    def _open_again_if_parsing_failed(self) -> Tracker:
        """Python 3.11 cannot parse source in two threads at once (python/cpython#106905); libraries do so as they start.

        A package whose import ended that way leaves its submodules behind, with which it could not be imported again.
        """
        try:
            return self._open()
        except SystemError:
            for name in list(sys.modules):
                if name.partition(".")[0] not in sys.modules:
                    del sys.modules[name]
            return self._open()

    def _work(self) -> None:
        try:
            tracker = self._open_again_if_parsing_failed()
            self._opened = True
            while (job := self._next()) is not None:
                job(tracker)
                with self._changed:
                    self._num_done += 1
                    self._changed.notify_all()
            tracker.close()
        # This is third-party code: no failure of it may stop the run.
        except (Exception, SystemExit) as failure:
            self._failure = failure
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._jobs:
                self._urgent = False
                self._changed.wait_for(lambda: self._urgent, self._timeouts.gather_s)
            return self._jobs.popleft()
