"""`jaxlm.train` that gets signals inside one kind of work: `<place>:<signal>:<call>:<delay>:<seconds until the second>`.

The work lasts longer than usual, so that both signals find it under way. Without a second signal, the last part is empty.
"""

import os
import sys
import threading
import time
from pathlib import Path

from jaxlm import train
from jaxlm.core import stores
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.observe.hooks import EvalHook

PLACE, NUMBER, CALL, DELAY, GAP = os.environ["JAXLM_TEST_SIGNALS"].split(":")
LASTS_S = 2.0
_calls: list[int] = []


def send() -> None:
    Path("signaled").touch()
    for wait in filter(None, (DELAY, GAP)):
        time.sleep(float(wait))
        os.kill(os.getpid(), int(NUMBER))


def lasting(function):
    """Sends the signals in the call that the environment names."""

    def wrapped(*args, **kwargs):
        _calls.append(1)
        if len(_calls) == int(CALL):
            threading.Thread(target=send, daemon=True).start()
            time.sleep(LASTS_S)
        return function(*args, **kwargs)

    return wrapped


PLACES = {
    "compile": (train, "compile_steps"),
    "save": (LocalFolder, "commit"),
    "eval": (EvalHook, "run"),
    "export": (stores, "fsync"),
}


def main(places=PLACES) -> int:
    """Trains, and sends the signals. Returns the exit code."""
    owner, name = places[PLACE]
    setattr(owner, name, lasting(getattr(owner, name)))
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
