"""What a run spends its wall time on. The loop says what it does; the ledger and the watchdog read it."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlm.core.values.logged import Activity

_callers = itertools.count()


class ActivityClock:
    """Adds up the seconds that a process spends on each activity. Other threads may read `activity` and `silent_s`.

    Attributes:
        started_unix_s: when the time that it counts began.
    """

    def __init__(self, age_s: float = 0.0, now: Callable[[], float] = time.monotonic):
        """Args:
        age_s: seconds since the process started, which count as START.
        now: returns a time in seconds.
        """
        self.activity = Activity.START
        self.started_unix_s = time.time() - age_s
        self._now = now
        self._begin = self._since = now() - age_s
        self._progress = now()
        self._seconds = dict.fromkeys(Activity, 0.0)

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Counts the time of the block as `activity`."""
        before = self.activity
        self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def elapsed_s(self) -> float:
        """Seconds since the clock began."""
        return self._now() - self._begin

    def progress(self) -> None:
        """Records that the current activity makes progress. A change of activity counts as progress, too."""
        self._progress = self._now()

    def silent_s(self) -> float:
        """Seconds without progress."""
        return self._now() - self._progress

    def seconds(self) -> dict[Activity, float]:
        """Seconds spent on each activity until now; together, `elapsed_s`."""
        seconds = dict(self._seconds)
        seconds[self.activity] += self._now() - self._since
        return seconds

    def _switch(self, activity: Activity) -> None:
        now = self._now()
        self._seconds[self.activity] += now - self._since
        self._progress = self._since = now  # before the activity: the watchdog reads both
        self.activity = activity


def process_age_s() -> float:
    """Seconds since this process was started, including the start of Python and all imports; 0 if unknown."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return 0.0


def uncounted_age_s() -> float:
    """`process_age_s` for the first caller. 0 for later ones: an earlier run in this process has counted that time."""
    return process_age_s() if next(_callers) == 0 else 0.0
