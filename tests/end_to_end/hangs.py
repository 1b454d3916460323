"""`jaxlm.train` that hangs for ever, or is slow for a good reason, at the point that the environment names."""

import os
import signal
import subprocess
import sys
import threading
import time

import jax

from jaxlm import train
from jaxlm.data.mixture import Mixture
from jaxlm.engine import metrics as reports
from jaxlm.engine.checkpoint.local import LocalFolder

FIRST_ROW = 16 * 9  # of step 10
SLOW_S = 13


def hang(*_args, **_kwargs):
    threading.Event().wait()


def in_the_loader():
    read = Mixture.read

    def reading(self, rows, *args):
        return hang() if rows.min() >= FIRST_ROW else read(self, rows, *args)

    Mixture.read = reading


def in_the_save(checkpoint):
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


PLACES = {
    "loader": in_the_loader,
    "save": lambda: in_the_save("step-5"),
    "last save": lambda: in_the_save("step-24"),
    "process 1": lambda: at_step(7, lambda: hang() if jax.process_index() == 1 else None),
    "nothing": in_a_slow_compilation_and_a_pause,
}

if __name__ == "__main__":
    PLACES[os.environ["JAXLM_TEST_HANGS_IN"]]()
    sys.exit(train.main())
