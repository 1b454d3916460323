"""`jaxlm.train` as on a host of its own: `<its name>:<seconds its clock is ahead>:<lease interval>:<step in seconds>`.

It trains 16 steps, and more when a file exists.
"""

import os
import platform
import socket
import sys
import time

from jaxlm import train
from jaxlm.engine import metrics as reports
from jaxlm.engine.checkpoint import lease

HOST, *NUMBERS = os.environ["JAXLM_TEST_HOST"].split(":")
AHEAD_S, INTERVAL_S, STEP_S = map(float, NUMBERS)
FIRST_STEPS = 16


done: list[int] = []


def slowly(self, *args, push=reports.AsyncMetrics.push):
    push(self, *args)
    time.sleep(STEP_S)
    done.append(1)
    while len(done) >= FIRST_STEPS and not os.path.exists(os.environ["JAXLM_TEST_GOES_ON"]):
        time.sleep(STEP_S)


def on_this_host(path, read=lease._read):
    return f"{path} of {HOST}" if path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id") else read(path)


def with_clock() -> None:
    clock, calendar, localtime = time.time, time.gmtime, time.localtime
    time.time = lambda: clock() + AHEAD_S
    time.gmtime = lambda seconds=None: calendar(time.time() if seconds is None else seconds)
    time.localtime = lambda seconds=None: localtime(time.time() if seconds is None else seconds)


if __name__ == "__main__":
    platform.node = socket.gethostname = lambda: HOST
    lease._read = on_this_host
    lease.INTERVAL_S = INTERVAL_S
    reports.AsyncMetrics.push = slowly
    with_clock()
    sys.exit(train.main())
