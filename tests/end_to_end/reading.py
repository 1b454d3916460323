"""`jaxlm.train` that records what this process reads, one JSON line per batch: examples, and evaluation sequences."""

import json
import os
import sys

import jax
import numpy as np

from jaxlm import train
from jaxlm.data import loader
from jaxlm.data.mixture import Mixture


def logging(kind: str, read):
    def reading(self, rows, *args):
        name = f"{os.environ['JAXLM_TEST_READS']}-{jax.process_index()}.jsonl"
        with open(name, "a") as file:
            file.write(json.dumps({"kind": kind, "rows": np.asarray(rows).tolist()}) + "\n")
        return read(self, rows, *args)

    return reading


if __name__ == "__main__":
    Mixture.read = logging("train", Mixture.read)
    loader._read_padded = logging("eval", loader._read_padded)
    sys.exit(train.main())
