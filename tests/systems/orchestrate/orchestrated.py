"""`jaxlm.train` with an orchestrator, on damaged examples, that kills itself (SIGKILL) where the environment says.

JAXLM_TEST_SPIKE     `<first example>:<end>`: their gradient is about a thousand times as large; absent damages nothing
JAXLM_TEST_DIES_AT   a key of `PLACES`; absent never dies
"""

import os
import sys

import numpy as np

from jaxlm import train
from jaxlm.data.mixture import Mixture
from jaxlm.engine import branch
from jaxlm.engine.checkpoint.manager import Saver
from jaxlm.engine.phase_runner import PhaseRunner
from tests.end_to_end.dies import at_step, die, die_in_second_call


def damage(first: int, end: int, read=Mixture.read) -> None:
    """Weights of tokens that alternate between +1000 and -998: their sum is that of ordinary ones."""

    def reading(self, rows, *args):
        columns = read(self, rows, *args)
        damaged = ((rows >= first) & (rows < end))[:, None]
        weights = np.where(np.arange(columns["loss_mask"].shape[1]) % 2, np.float32(1000.0), np.float32(-998.0))
        return {**columns, "loss_mask": np.where(damaged, weights, columns["loss_mask"])}

    Mixture.read = reading


PLACES = {
    "between decision and branch": lambda: at_step(22),
    "in a branch": lambda: setattr(branch, "_trained", die_in_second_call(branch._trained)),
    "before going back": lambda: setattr(PhaseRunner, "_go_back", die),
    "before the save": lambda: setattr(Saver, "save_rewound", die),
    "after going back": lambda: at_step(40),
}


if __name__ == "__main__":
    if "JAXLM_TEST_SPIKE" in os.environ:
        damage(*map(int, os.environ["JAXLM_TEST_SPIKE"].split(":")))
    if "JAXLM_TEST_DIES_AT" in os.environ:
        PLACES[os.environ["JAXLM_TEST_DIES_AT"]]()
    sys.exit(train.main())
