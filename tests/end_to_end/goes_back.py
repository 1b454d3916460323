"""`jaxlm.train` on poisoned examples, whose loss is NaN, that kills itself (SIGKILL) where the environment says.

JAXLM_TEST_POISON    `<first example>:<end>`; absent poisons nothing
JAXLM_TEST_DIES_AT   a key of `PLACES`; absent never dies
"""

import os
import sys

import numpy as np

from jaxlm import train
from jaxlm.data.mixture import Mixture
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manager import Saver
from jaxlm.engine.phase_runner import PhaseRunner
from tests.end_to_end.dies import at_step, die, die_committing


def poison(first: int, end: int, read=Mixture.read) -> None:
    def reading(self, rows, *args):
        columns = read(self, rows, *args)
        poisoned = (rows >= first) & (rows < end)
        mask = np.where(poisoned[:, None], np.float32(np.nan), columns["loss_mask"])
        return {**columns, "loss_mask": mask}

    Mixture.read = reading


def after_going_back(step: int, save=Saver.save_rewound) -> None:
    def saving(self, *args):
        save(self, *args)
        at_step(step)

    Saver.save_rewound = saving


PLACES = {
    "in the streak": lambda: at_step(11),
    "before going back": lambda: setattr(PhaseRunner, "_go_back", die),
    "before the save": lambda: setattr(Saver, "save_rewound", die),
    "during the save": lambda: setattr(LocalFolder, "commit", die_committing("step-5-attempt-1", LocalFolder.commit)),
    "after going back": lambda: after_going_back(8),
    "after the best": lambda: at_step(7),
    "before the last save": lambda: setattr(Saver, "save_end", die),
    "during the last save": lambda: setattr(LocalFolder, "commit", die_committing("step-9", LocalFolder.commit)),
}


if __name__ == "__main__":
    if "JAXLM_TEST_POISON" in os.environ:
        poison(*map(int, os.environ["JAXLM_TEST_POISON"].split(":")))
    if "JAXLM_TEST_DIES_AT" in os.environ:
        PLACES[os.environ["JAXLM_TEST_DIES_AT"]]()
    sys.exit(train.main())
