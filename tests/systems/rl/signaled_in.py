"""`jaxlm.train` that gets signals inside one kind of work, which may be a rollout: see `tests.end_to_end.signaled_in`."""

import sys

from jaxlm.systems.rl.maker import RolloutMaker
from tests.end_to_end.signaled_in import PLACES, main

if __name__ == "__main__":
    sys.exit(main({**PLACES, "rollout": (RolloutMaker, "_scores")}))
