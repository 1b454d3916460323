"""`jaxlm.train` with short lease intervals, and steps that take some time: `<interval in seconds>:<step in seconds>`."""

import os
import sys
import time

from jaxlm import train
from jaxlm.engine import metrics as reports
from jaxlm.engine.checkpoint import lease

INTERVAL_S, STEP_S = map(float, os.environ["JAXLM_TEST_LEASE"].split(":"))


def slowly(self, *args, push=reports.AsyncMetrics.push):
    push(self, *args)
    time.sleep(STEP_S)


if __name__ == "__main__":
    lease.INTERVAL_S = INTERVAL_S
    reports.AsyncMetrics.push = slowly
    sys.exit(train.main())
