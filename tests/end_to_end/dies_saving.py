"""`jaxlm.train` that kills itself (SIGKILL) during a save to a bucket: `<process>:<checkpoint>`.

Process 0 does so when only the last file is missing, any other process while arrays are being written.
"""

import os
import sys

import jax

from jaxlm import train
from jaxlm.engine.checkpoint.integrity import CHECKSUMS
from jaxlm.engine.checkpoint.manager import CheckpointWriter
from jaxlm.engine.checkpoint.remote import RemoteFolder
from tests.end_to_end.dies import die

PROCESS, NAME = os.environ["JAXLM_TEST_DIES_SAVING"].split(":")


def writing(self, name, file, content, write=RemoteFolder.write):
    if (name, file) == (NAME, CHECKSUMS):
        die()
    write(self, name, file, content)


def committing(self, name, commit=CheckpointWriter._commit):
    if name == NAME and jax.process_index() == int(PROCESS):
        die()
    commit(self, name)


if __name__ == "__main__":
    if PROCESS == "0":
        RemoteFolder.write = writing
    else:
        CheckpointWriter._commit = committing
    sys.exit(train.main())
