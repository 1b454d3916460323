"""Ends a process that hangs: a dead loader thread, a save that never ends, a collective that the others never reach."""

import contextlib
import faulthandler
import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import jax

from jaxlm.core.errors import EXIT_HUNG, ConfigError
from jaxlm.core.rules import Rules, ordered
from jaxlm.core.values.logged import Activity
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.peers import end_with_peers

# Reading a whole corpus or compiling a large model may take hours without anything being wrong.
_MAY_TAKE_LONG = (Activity.START, Activity.COMPILE)
_MAX_POLL_S = 1.0
_TELLING_S = 15.0
_STDERR = 2


@dataclass(frozen=True)
class WatchdogConfig:
    """Sets what to do when a run makes no progress: no step, evaluation batch, save or restore begins or ends.

    Opening the data and compiling are not watched. Exports and uploads count as a save.

    Attributes:
        report_after: time without progress after which each process writes the stacks of all its threads to standard error
            and to `<log_dir>/<id>/stacks-<process>.txt`.
        end_after: time without progress after which all processes end with exit code 75, which asks for a new start. Set it
            longer than your longest save or evaluation batch; null never ends them. With several processes, also longer than
            a rollout that a server samples or an environment takes part in: only process 0 reports progress during it.
    """

    report_after: timedelta = timedelta(minutes=1)
    end_after: timedelta | None = timedelta(hours=1)
    key_rules: ClassVar[Rules] = (ordered("report_after", "end_after"),)

    def __post_init__(self) -> None:
        for name, value in (("report_after", self.report_after), ("end_after", self.end_after)):
            if value is not None and not timedelta(seconds=1) <= value <= timedelta(days=365):
                raise ConfigError(f"{name}: {value} given, 1s to 365d expected")


class Watchdog:
    """A thread that watches the main thread's progress. Use it as a context.

    It does not log: the disk of the log may be what hangs. If a library holds Python's lock, so that this thread cannot run
    either, a timer of `faulthandler` still writes the stacks, but nothing ends the process.
    """

    def __init__(self, config: WatchdogConfig, clock: ActivityClock, folder: Path):
        """Args: folder: where the file with the stacks is written."""
        self._report_s = config.report_after.total_seconds()
        self._end_s = None if config.end_after is None else config.end_after.total_seconds()
        self._clock = clock
        self._stacks = folder / f"stacks-{jax.process_index()}.txt"
        self._poll_s = min(_MAX_POLL_S, self._report_s / 10)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxlm-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=2 * self._poll_s)
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        silent_s, report_s, before = 0.0, self._report_s, time.monotonic()
        while not self._ended.wait(self._poll_s):
            now = time.monotonic()
            # A process that was paused (SIGSTOP, a frozen container) has not been silent for that time.
            silent_s = min(silent_s + min(now - before, 2 * self._poll_s), self._clock.silent_s())
            before = now
            activity = self._clock.activity
            if activity in _MAY_TAKE_LONG:
                silent_s, report_s = 0.0, self._report_s
                faulthandler.cancel_dump_traceback_later()
                continue
            # To the descriptor: a notebook's sys.stderr has none.
            faulthandler.dump_traceback_later(self._report_s + 10 * self._poll_s, file=_STDERR)
            if silent_s >= report_s:
                report_s *= 2  # steps that are slow but end are not reported again and again
                self._report(activity, silent_s)
            if self._end_s is not None and silent_s >= self._end_s:
                self._end(activity, silent_s)

    def _report(self, activity: Activity, silent_s: float) -> None:
        begin = (
            f"no progress for {silent_s:.0f} s ({activity}) on process {jax.process_index()}. Stacks of all threads:"
        )
        _say(begin)
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(_STDERR, all_threads=True)
        # In a thread of its own, because the disk may be what hangs.
        threading.Thread(target=self._write_stacks, args=(begin,), name="jaxlm-stacks", daemon=True).start()

    def _write_stacks(self, begin: str) -> None:
        with contextlib.suppress(OSError):
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks.open("a") as file:
                file.write(f"{begin}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)

    def _end(self, activity: Activity, silent_s: float) -> None:
        try:
            message = (
                f"no progress for {silent_s:.0f} s ({activity}; trainer.watchdog.end_after). The stacks of all threads are"
                f" above, and in {self._stacks}. Run the same command again to continue from the newest checkpoint"
            )
            _say(f"error: {message}")
            telling = threading.Thread(target=end_with_peers, args=(EXIT_HUNG, message), daemon=True)
            telling.start()
            telling.join(timeout=_TELLING_S)  # what tells them may hang, too
        finally:
            os._exit(EXIT_HUNG)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"{line}\n".encode())
