"""`examples/minimal_train.py` that sends itself SIGTERM when it logs a step: `JAXLM_TEST_SIGNAL_AT`."""

import os
import signal
import sys

from examples import minimal_train
from jaxlm.observe.trackers import JsonlTracker


def signaling(self, step, metrics, log=JsonlTracker.log):
    log(self, step, metrics)
    if step == int(os.environ["JAXLM_TEST_SIGNAL_AT"]):
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    JsonlTracker.log = signaling
    sys.exit(minimal_train.main())
