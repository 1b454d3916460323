"""`jaxlm.train` on a disk that is full from now on: sealing a checkpoint fails as the operating system would say it."""

import errno
import os
import sys

from jaxlm import train
from jaxlm.engine import checkpoint


def full(_folder):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if __name__ == "__main__":
    checkpoint.seal = full
    sys.exit(train.main())
