"""`jaxlm.train` that kills itself (SIGKILL) at the point that the environment names."""

import os
import signal
import sys

from jaxlm import train
from jaxlm.data.annotations import AnnotationFolder
from jaxlm.engine import metrics as reports
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manager import Saver
from jaxlm.session import annotate


def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def at_step(step: int) -> None:
    """Kills the process when a step is dispatched."""
    push = reports.AsyncMetrics.push

    def pushing(self, number, *args, **kwargs):
        push(self, number, *args, **kwargs)
        if number >= step:
            die()

    reports.AsyncMetrics.push = pushing


PLACES = {
    "first phase": lambda: at_step(8),
    "second phase": lambda: at_step(14),
    "after five steps": lambda: at_step(5),
    "after the entry": lambda: at_step(8),
    # The first phase's last checkpoint exists, and nothing of the second phase.
    "boundary": lambda: setattr(train, "enter_phase", die_in_second_phase(train.enter_phase, lambda _, phase: phase)),
    # The surgery is done, but its checkpoint is not saved yet.
    "after surgery": lambda: setattr(
        Saver, "save_entry", die_in_second_phase(Saver.save_entry, lambda saver, _: saver._phase)
    ),
    # That checkpoint is completely written, but not renamed yet.
    "saving the entry": lambda: setattr(LocalFolder, "commit", die_committing("step-12-adapt", LocalFolder.commit)),
    # The first block of annotations is on disk, and others are to come.
    "annotating": lambda: (
        setattr(annotate, "_BLOCK_EXAMPLES", 1),
        setattr(AnnotationFolder, "write", die_in_second_call(AnnotationFolder.write)),
    ),
}


def die_in_second_call(function):
    """Dies in the second call."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            die()
        return function(*args, **kwargs)

    return wrapped


def die_in_second_phase(function, phase_of):
    """Dies in a call for the second phase. Args: phase_of: the phase, from the first two arguments."""

    def wrapped(*args, **kwargs):
        if phase_of(*args[:2]).index == 1:
            die()
        return function(*args, **kwargs)

    return wrapped


def die_committing(checkpoint, commit):
    return lambda self, name: die() if name == checkpoint else commit(self, name)


def main(places=PLACES) -> int:
    """Trains until the place that the environment names. Returns the exit code."""
    place = os.environ["JAXLM_TEST_DIES_AT"]
    at_step(int(place)) if place.isdigit() else places[place]()
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
