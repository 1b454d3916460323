"""`jaxlm.train` that hangs for ever, or is slow for a good reason, at the point that the environment names.

Where it hangs, the watchdog counts the time only once it does: a busy machine may be slow before.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax

from jaxlm import train
from jaxlm.core.values.logged import Activity
from jaxlm.data.mixture import Mixture
from jaxlm.engine import metrics as reports
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.checkpoint.local import LocalFolder
from tests.end_to_end.waiting import wait_for

FIRST_ROW = 16 * 9  # of step 10
SLOW_S = 13
HANGS = Path("hangs").absolute()  # there once a process hangs


def hang(*_args, **_kwargs):
    HANGS.touch()
    threading.Event().wait()


def count_only_the_hang(waiting: Activity | None = None):
    """Args: waiting: what the main thread does when it waits for what hangs; None if it may be anything."""
    silent_s = ActivityClock.silent_s

    def counted_s(self):
        return silent_s(self) if HANGS.exists() and waiting in (None, self.activity) else 0.0

    ActivityClock.silent_s = counted_s


def in_the_loader():
    count_only_the_hang(Activity.DATA)
    read = Mixture.read

    def reading(self, rows, *args):
        if rows.min() >= FIRST_ROW:
            wait_for(Path("checkpoints/run/step-5").exists)
            hang()
        return read(self, rows, *args)

    Mixture.read = reading


def in_the_save(checkpoint):
    count_only_the_hang(Activity.SAVE)
    commit = LocalFolder.commit
    LocalFolder.commit = lambda self, name: hang() if name == checkpoint else commit(self, name)


def at_step(number, action):
    push = reports.AsyncMetrics.push

    def pushing(self, step, *args):
        push(self, step, *args)
        if step == number:
            action()

    reports.AsyncMetrics.push = pushing


def pause():
    """Stops this process, which another one continues."""
    subprocess.Popen(["sh", "-c", f"sleep {SLOW_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def in_a_slow_compilation_and_a_pause():
    compile_steps = train.compile_steps

    def slowly(*args):
        time.sleep(SLOW_S)
        return compile_steps(*args)

    train.compile_steps = slowly
    at_step(7, pause)


def in_process_1():
    count_only_the_hang()
    at_step(7, lambda: hang() if jax.process_index() == 1 else None)


PLACES = {
    "loader": in_the_loader,
    "save": lambda: in_the_save("step-5"),
    "last save": lambda: in_the_save("step-24"),
    "process 1": in_process_1,
    "nothing": in_a_slow_compilation_and_a_pause,
}

if __name__ == "__main__":
    PLACES[os.environ["JAXLM_TEST_HANGS_IN"]]()
    sys.exit(train.main())
