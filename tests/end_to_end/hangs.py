"""`jaxlm.train` that hangs for ever at the point that the environment names."""

import os
import sys
import threading

import jax

from jaxlm import train
from jaxlm.data.mixture import Mixture
from jaxlm.engine import metrics as reports
from jaxlm.engine.checkpoint.local import LocalFolder

FIRST_ROW = 16 * 9  # of step 10


def hang(*_args, **_kwargs):
    threading.Event().wait()


def in_the_loader():
    read = Mixture.read

    def reading(self, rows, *args):
        return hang() if rows.min() >= FIRST_ROW else read(self, rows, *args)

    Mixture.read = reading


def in_a_save():
    commit = LocalFolder.commit
    LocalFolder.commit = lambda self, name: hang() if name == "step-5" else commit(self, name)


def on_process_1():
    push = reports.AsyncMetrics.push

    def pushing(self, step, *args):
        push(self, step, *args)
        if step == 7 and jax.process_index() == 1:
            hang()

    reports.AsyncMetrics.push = pushing


PLACES = {"loader": in_the_loader, "save": in_a_save, "process 1": on_process_1}

if __name__ == "__main__":
    PLACES[os.environ["JAXLM_TEST_HANGS_IN"]]()
    sys.exit(train.main())
