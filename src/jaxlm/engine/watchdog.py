"""Ends a process that hangs: a dead loader thread, a save that never ends, a collective that the others never reach."""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.engine.activity import Activity, ActivityClock
from jaxlm.engine.peers import end_with_peers

# Compiling a large model, reading a whole corpus or evaluating a benchmark may take hours without anything being wrong.
_MAY_TAKE_LONG = (Activity.START, Activity.COMPILE)
_EXIT_HUNG = 1
_POLLS = 20  # in the time after which the stacks are written


@dataclass(frozen=True)
class WatchdogConfig:
    """What to do when a run makes no progress: no step, no evaluation and no save begins or ends. Compiling is progress.

    Attributes:
        report_after: time without progress after which the stacks of all threads are written to
            `<log_dir>/<id>/stacks-<process>.txt`, with a line on the console.
        end_after: time without progress after which all processes end with exit code 1; null never ends them. Longer than
            the longest evaluation and the longest save.
    """

    report_after: timedelta = timedelta(seconds=60)
    end_after: timedelta | None = timedelta(hours=1)

    def __post_init__(self) -> None:
        for name in ("report_after", "end_after"):
            value = getattr(self, name)
            if value is not None and value < timedelta(seconds=1):
                raise ConfigError(f"trainer.watchdog.{name}: {value} given, 1s or more expected")


class Watchdog:
    """A thread that watches the main thread's progress. Use it as a context."""

    def __init__(self, config: WatchdogConfig, clock: ActivityClock, folder: Path, log: Callable[[str], None]):
        """Args: folder: where the file with the stacks is written."""
        self._report_s = config.report_after.total_seconds()
        self._end_s = None if config.end_after is None else config.end_after.total_seconds()
        self._clock = clock
        self._stacks = folder / f"stacks-{jax.process_index()}.txt"
        self._log = log
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxlm-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        reported = False
        while not self._ended.wait(self._report_s / _POLLS):
            activity, silent_s = self._clock.activity, self._clock.silent_s()
            if activity in _MAY_TAKE_LONG or silent_s < self._report_s:
                reported = False
                continue
            if not reported:
                reported = True
                self._write_stacks(activity, silent_s)
            if self._end_s is not None and silent_s >= self._end_s:
                message = (
                    f"no progress for {silent_s:.0f} s ({activity}; trainer.watchdog.end_after): all stacks are"
                    f" in {self._stacks}. Run the same command again to continue from the newest checkpoint"
                )
                print(f"error: {message}", file=sys.stderr, flush=True)
                end_with_peers(_EXIT_HUNG, message)
                os._exit(_EXIT_HUNG)

    def _write_stacks(self, activity: Activity, silent_s: float) -> None:
        begin = f"no progress for {silent_s:.0f} s ({activity})"
        try:
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks.open("a") as file:
                file.write(f"{begin}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            self._log(f"{begin}. The stacks of all threads cannot be written to {self._stacks}: {error.strerror}")
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        else:
            self._log(f"{begin}: the stacks of all threads are in {self._stacks}")
