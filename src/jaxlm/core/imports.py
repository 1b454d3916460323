"""Importing haliax so that it works on every jax, and Python's garbage collector, paused where most of what is made stays."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
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


def restore_is_constant_dim() -> None:
    """Gives ``jax.core`` back the one name that haliax needs, on jax versions that dropped it.

    haliax 1.4.dev453 calls ``jax.core.is_constant_dim``, which jax removed in 0.11. The function itself still exists under
    ``jax._src.core``.
    """
    import jax.core

    if not hasattr(jax.core, "is_constant_dim"):
        from jax._src import core as jax_core

        jax.core.is_constant_dim = jax_core.is_constant_dim  # pyright: ignore[reportAttributeAccessIssue]


with gc_paused():  # the two that create the most objects; every part of jaxlm that computes needs both
    import haliax as haliax
    import optax as optax
restore_is_constant_dim()
