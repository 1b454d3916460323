"""`jaxlm.train` that kills itself (SIGKILL) during a save to a bucket: `<process>:<checkpoint>`.

Process 0 does so when only the last file is missing, any other process while arrays are being written.
"""

import os
import sys

import jax

from jaxlm import train
from jaxlm.engine.checkpoint.bucket import BucketFolder
from jaxlm.engine.checkpoint.manifest import CHECKSUMS
from jaxlm.engine.checkpoint.writer import CheckpointWriter
from tests.end_to_end.dies import die

PROCESS, NAME = os.environ["JAXLM_TEST_DIES_SAVING"].split(":")


def writing(self, name, file, content, write=BucketFolder._write):
    if (name, file) == (NAME, CHECKSUMS):
        die()
    write(self, name, file, content)


def beginning(self, save, begin=CheckpointWriter._begin):
    begin(self, save)
    if save.name == NAME and jax.process_index() == int(PROCESS):
        die()


if __name__ == "__main__":
    if PROCESS == "0":
        BucketFolder._write = writing
    else:
        CheckpointWriter._begin = beginning
    sys.exit(train.main())
