"""The few lines that keep haliax working across jax versions.

haliax 1.4.dev453 calls ``jax.core.is_constant_dim``, which jax removed in 0.11. The function itself still exists under
``jax._src.core``, so it is put back under its old name. Import this module before the first use of haliax.
"""

import jax
import jax.core


def restore_is_constant_dim() -> None:
    """Gives ``jax.core`` back the one name that haliax needs, on jax versions that dropped it."""
    if not hasattr(jax.core, "is_constant_dim"):
        from jax._src import core as jax_core

        jax.core.is_constant_dim = jax_core.is_constant_dim  # pyright: ignore[reportAttributeAccessIssue]


restore_is_constant_dim()
