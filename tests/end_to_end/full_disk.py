"""`jaxlm.train` on a disk that is full from the first save on, at the point that the environment names."""

import errno
import os
import resource
import signal
import sys

from jaxlm import train
from jaxlm.engine.checkpoint import local as local_module
from jaxlm.engine.checkpoint.writer import CheckpointWriter


def while_sealing() -> None:
    def full(_folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    local_module.seal = full


def while_writing_arrays() -> None:
    """Limits files to 40 kB, so Orbax's own threads get the operating system's error."""
    start = CheckpointWriter.start

    def limited(self, *args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
        start(self, *args)

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    CheckpointWriter.start = limited


PLACES = {"sealing": while_sealing, "writing arrays": while_writing_arrays}


if __name__ == "__main__":
    PLACES[os.environ["JAXLM_TEST_DISK_FULL"]]()
    sys.exit(train.main())
