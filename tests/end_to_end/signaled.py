"""`jaxlm.train` that sends itself a signal when a step is dispatched: `<signal>:<process>:<step>[:twice]`.

At step 0 it sends the signal in a compilation that takes ten minutes. The other processes compile for 20 s in which none of
their Python threads runs, as on a very busy machine.
"""

import ctypes
import os
import sys
import time

import jax

from jaxlm import train
from jaxlm.engine import metrics as reports

NUMBER, PROCESS, STEP, *TWICE = os.environ["JAXLM_TEST_SIGNAL"].split(":")


def signalling(self, step, *args, push=reports.AsyncMetrics.push):
    push(self, step, *args)
    if step == int(STEP) and jax.process_index() == int(PROCESS):
        os.kill(os.getpid(), int(NUMBER))
        os.kill(os.getpid(), int(NUMBER))  # as `timeout` does: together they are one signal
        while TWICE:  # the thread that answers may be late for the first one
            time.sleep(1.5)
            os.kill(os.getpid(), int(NUMBER))


def compiling(*args, compile_steps=train.compile_steps):
    if jax.process_index() != int(PROCESS):
        ctypes.PyDLL(None).sleep(20)  # unlike time.sleep, it keeps Python's global lock
        return compile_steps(*args)
    os.kill(os.getpid(), int(NUMBER))
    return time.sleep(600)


if __name__ == "__main__":
    if int(STEP) == 0:
        train.compile_steps = compiling
    reports.AsyncMetrics.push = signalling
    sys.exit(train.main())
