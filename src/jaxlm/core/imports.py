"""Imports haliax with a fix for new jax versions, and pauses garbage collection during allocation-heavy startup code."""

import contextlib
import gc
from collections.abc import Iterator

_frozen = False  # whether the caller has frozen objects


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses garbage collection. Use it as a context manager or decorator around imports, planning and compilation.

    The collector would traverse all objects each time their number grows by a quarter, which costs 0.5 s of the 3.4 s of
    CPU time at startup (`docs/log.md`). At the end all objects move to the oldest generation without a traversal; garbage
    among them waits for the next full collection.
    """
    global _frozen
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # unfreeze() would also unfreeze objects that the caller froze. Counting visits each of them, so they are counted
        # until there are some.
        _frozen = _frozen or gc.get_freeze_count() > 0
        if not _frozen:
            gc.freeze()
            gc.unfreeze()  # moves all objects to the oldest generation
        if was_enabled:
            gc.enable()


with gc_paused():  # the imports that create the most objects
    import haliax as haliax
    import jax.core
    import optax as optax
if not hasattr(jax.core, "is_constant_dim"):  # haliax 1.4.dev453 calls it; jax 0.11 only has it in jax._src.core
    from jax._src import core as jax_core

    jax.core.is_constant_dim = jax_core.is_constant_dim  # pyright: ignore[reportAttributeAccessIssue]
