"""`jaxlm.train` whose compilation takes nine seconds more."""

import sys
import time

from jaxlm import train

compile_steps = train.compile_steps


def slowly(*args):
    time.sleep(9)
    return compile_steps(*args)


if __name__ == "__main__":
    train.compile_steps = slowly
    sys.exit(train.main())
