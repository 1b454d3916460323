"""Python's garbage collector, out of the way where most of what is made stays."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """Has the collector rest, as a context or a decorator: for imports, plans and compiled programs.

    It would search all that is there again each time that there is a quarter more: 0.5 of a start's 3.4 s of CPU
    (`docs/log.md`).
    What is there at the end counts as old, as if searched; garbage among it waits for the next full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else it is not ours to thaw
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if was_enabled:
            gc.enable()
