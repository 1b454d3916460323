"""`jaxlm.train` that kills itself (SIGKILL) during a rollout."""

import sys

from jaxlm.systems.rl.maker import RolloutMaker
from tests.end_to_end.dies import die_in_second_call, main

PLACES = {
    # The responses of the second rollout are sampled, and not scored.
    "scoring": lambda: setattr(RolloutMaker, "_scores", die_in_second_call(RolloutMaker._scores)),
}


if __name__ == "__main__":
    sys.exit(main(PLACES))
