"""`jaxlm.train` that sends itself a signal when a step is dispatched: `<signal>:<process>:<step>[:twice]`."""

import os
import sys

import jax

from jaxlm import train
from jaxlm.engine import metrics as reports

NUMBER, PROCESS, STEP, *TWICE = os.environ["JAXLM_TEST_SIGNAL"].split(":")


def signalling(self, step, *args, push=reports.AsyncMetrics.push):
    push(self, step, *args)
    if step == int(STEP) and jax.process_index() == int(PROCESS):
        for _ in range(2 if TWICE else 1):
            os.kill(os.getpid(), int(NUMBER))


if __name__ == "__main__":
    reports.AsyncMetrics.push = signalling
    sys.exit(train.main())
