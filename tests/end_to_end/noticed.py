"""`jaxlm.train` whose machine is preempted when a step is dispatched: `<process>:<step>`."""

import http.client
import os
import sys
import threading

import jax

from jaxlm import train
from jaxlm.engine import metrics as reports
from jaxlm.engine.preemption import StopRequest

PROCESS, STEP = map(int, os.environ["JAXLM_TEST_NOTICE"].split(":"))
noticed = threading.Event()


def noticing(self, reason, preempt=StopRequest.preempt):
    preempt(self, reason)
    noticed.set()


def preempted(self, step, *args, push=reports.AsyncMetrics.push):
    push(self, step, *args)
    if step == STEP and jax.process_index() == PROCESS:
        connection = http.client.HTTPConnection(os.environ["GCE_METADATA_HOST"])
        connection.request("PUT", "/", body='{"preempted": "TRUE"}')
        assert connection.getresponse().status == 200
        assert noticed.wait(300)


if __name__ == "__main__":
    reports.AsyncMetrics.push = preempted
    StopRequest.preempt = noticing
    sys.exit(train.main())
