"""`jaxlm.train` whose disk misbehaves as long as the file `disk` says so, and some of whose batches are NaN.

The file is in the working folder, and is `full` or `stalled`. JAXLM_TEST_POISON lists the steps whose batches have a loss
mask of NaN, and JAXLM_TEST_BATCH is the number of sequences in a batch. JAXLM_TEST_PACE as in `storage_faults`.
"""

import errno
import os
import sys
import time
from pathlib import Path

import numpy as np

from jaxlm import train
from jaxlm.data.mixture import Mixture
from tests.end_to_end.storage_faults import Disk, fail, slow_down

DISK, FULL, STALLED = Path("disk"), "full", "stalled"
STALL_S = 2.0


def disk() -> None:
    place = DISK.absolute()

    def fault(operation, path):
        try:
            now = place.read_text()
        except FileNotFoundError:
            return
        if now == FULL and operation in ("open", "mkdir") and "unfinished" in path:
            fail(errno.ENOSPC, path)
        if now == STALLED and operation == "fsync":
            time.sleep(STALL_S)

    Disk(fault)


def poison(steps: set[int], batch: int) -> None:
    read = Mixture.read

    def reading(self, rows, *args):
        columns = read(self, rows, *args)
        poisoned = np.isin(np.asarray(rows) // batch + 1, list(steps))
        if poisoned.any():
            columns["loss_mask"] = np.where(poisoned[:, None], np.nan, columns["loss_mask"]).astype(np.float32)
        return columns

    Mixture.read = reading


if __name__ == "__main__":
    disk()
    poison({int(step) for step in os.environ["JAXLM_TEST_POISON"].split(",")}, int(os.environ["JAXLM_TEST_BATCH"]))
    slow_down(float(os.environ["JAXLM_TEST_PACE"]))
    sys.exit(train.main())
