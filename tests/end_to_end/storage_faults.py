"""`jaxlm.train` on a disk that misbehaves.

JAXLM_TEST_FAULT is a fault and its numbers, separated by colons:

errors:<seed>        each file operation in the run's checkpoint folder fails in 5 % of the cases, and arrays in some saves
stall:<n>:<seconds>  each save takes until the run is n steps further, but at most so long, in its first file
enospc               from step 7 to step 19, no small file can be written
large_files          from step 7 to step 19, no large file can be written: the arrays, which C++ code writes
unreachable          from step 7 to step 19, every file operation in the folder `store` fails
erofs                from step 7 to step 19, the disk is read-only
process:<n>          like `large_files`, on one of several processes
none                 nothing; at step 7, the run waits for the file `go` in the working folder

A fault that begins at a step begins once the save of step 5 is finished.

JAXLM_TEST_PACE is the number of seconds by which each step is slower, so that a run lasts longer than its faults.
"""

import builtins
import errno
import io
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax

from jaxlm import train
from jaxlm.engine import metrics as reports
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manifest import CHECKSUMS
from jaxlm.engine.checkpoint.writer import CheckpointWriter
from tests.end_to_end.waiting import wait_for, wait_for_go

FOLDER, STORE = "checkpoints/run", "store"
SAVED_STEP, FIRST_STEP, LAST_STEP, NUM_STEPS = 5, 7, 19, 24
_OPERATIONS = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "scandir", "fsync", "listdir")
_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


class Disk:
    """Calls `fault(operation, path)` before each file operation in a folder of the threads that save."""

    def __init__(self, fault, folder=FOLDER):
        self._fault = fault
        self._root = str(Path(folder).absolute())
        for module, names in ((os, _OPERATIONS), (io, ("open",)), (builtins, ("open",))):
            for name in names:
                setattr(module, name, self._wrapped(name, getattr(module, name)))

    def _wrapped(self, name, operation):
        def wrapped(path, *args, **kwargs):
            at = self._path(path)
            if is_saving() and at.startswith(self._root):
                self._fault(name, at)
            return operation(path, *args, **kwargs)

        return wrapped

    def _path(self, path) -> str:
        if isinstance(path, int):
            return os.readlink(f"/proc/self/fd/{path}")
        return os.path.abspath(os.fsdecode(path))


def is_saving() -> bool:
    """Whether this thread saves. The faults begin with the training, and opening the run is no part of it."""
    return threading.current_thread() is not threading.main_thread()


def fail(number: int, path) -> None:
    raise OSError(number, os.strerror(number), path)


def limit_files(bound: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (bound, resource.RLIM_INFINITY))


def errors(seed: str) -> None:
    rng = random.Random(int(seed))
    Disk(lambda _, path: fail(rng.choice(_ERRORS), path) if rng.random() < 0.05 else None)
    copy = CheckpointWriter._copy

    def copying(self, save):
        writes = copy(self, save)

        def result():
            limit_files(20_000 if rng.random() < 0.1 else resource.RLIM_INFINITY)
            try:
                return [write.result() for write in writes]
            finally:
                limit_files(resource.RLIM_INFINITY)

        return [SimpleNamespace(result=result)]

    CheckpointWriter._copy = copying


def after_each_step(act) -> None:
    push = reports.AsyncMetrics.push

    def pushing(self, step, *args):
        push(self, step, *args)
        act(step)

    reports.AsyncMetrics.push = pushing


def stall(num_steps: str, seconds: str) -> None:
    begin, further, newest = LocalFolder.begin, threading.Condition(), [0]

    def go_on(step: int) -> None:
        with further:
            newest[0] = step
            further.notify_all()

    def beginning(self, name, files):
        step = int(name.split("-")[1])
        # The run waits for the saves of its first state and of its last one.
        until = min(step + int(num_steps), NUM_STEPS - 1)
        if step:
            with further:
                if not further.wait_for(lambda: newest[0] >= until, float(seconds)):
                    print(f"no step was done during the save of step {step}", flush=True)
        begin(self, name, files)

    LocalFolder.begin = beginning
    after_each_step(go_on)


def for_a_while(begin, end) -> None:
    def act(step: int) -> None:
        if step == FIRST_STEP:
            wait_for(lambda: any(Path().glob(f"*/run/step-{SAVED_STEP}/{CHECKSUMS}")))
            begin()
        if step == LAST_STEP:
            end()

    after_each_step(act)


def none() -> None:
    after_each_step(lambda step: wait_for_go(Path()) if step == FIRST_STEP else None)


def enospc() -> None:
    full = threading.Event()

    def fault(operation, path):
        if full.is_set() and operation in ("open", "mkdir") and "unfinished" in path:
            fail(errno.ENOSPC, path)

    Disk(fault)
    for_a_while(full.set, full.clear)


def large_files() -> None:
    for_a_while(lambda: limit_files(20_000), lambda: limit_files(resource.RLIM_INFINITY))


def erofs() -> None:
    read_only = threading.Event()
    Disk(lambda _, path: fail(errno.EROFS, path) if read_only.is_set() else None)
    for_a_while(read_only.set, read_only.clear)


def unreachable() -> None:
    is_gone = threading.Event()
    Disk(lambda _, path: fail(errno.EIO, path) if is_gone.is_set() else None, STORE)
    for_a_while(is_gone.set, is_gone.clear)


def process(number: str) -> None:
    is_it = lambda: jax.process_index() == int(number)  # noqa: E731
    for_a_while(lambda: is_it() and limit_files(10_000), lambda: limit_files(resource.RLIM_INFINITY))


FAULTS = {
    function.__name__: function for function in (errors, stall, enospc, large_files, erofs, unreachable, process, none)
}


def slow_down(seconds: float) -> None:
    after_each_step(lambda _: time.sleep(seconds))


if __name__ == "__main__":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    fault, *numbers = os.environ["JAXLM_TEST_FAULT"].split(":")
    FAULTS[fault](*numbers)
    slow_down(float(os.environ["JAXLM_TEST_PACE"]))
    sys.exit(train.main())
