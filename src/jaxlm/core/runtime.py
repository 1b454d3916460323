"""The processes of a run: jax's options in each, waiting for them, talking about process 0."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from jaxlm.core.errors import ConfigError

T = TypeVar("T")


def configure_jax(options: Mapping[str, Any]) -> None:
    """Sets options of jax itself. Call it before anything of jax is used.

    Raises:
        ConfigError: jax has no such option, or not such a value.
    """
    for name, value in options.items():
        if name == "jax_compilation_cache_dir":
            raise ConfigError("trainer.jax_config.jax_compilation_cache_dir: say trainer.compilation_cache_dir instead")
        try:
            jax.config.update(name, value)
        except (AttributeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"trainer.jax_config.{name}: {value!r} given; jax {jax.__version__} says: {error}"
            ) from error


def is_main_process() -> bool:
    """Whether this process is the one that prints, logs and decides on time."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def broadcast_from_main(values: np.ndarray) -> np.ndarray:
    """Process 0's small array, on every process."""
    if jax.process_count() == 1:
        return values
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.broadcast_one_to_all(values))


def everywhere(holds: bool) -> bool:
    """Whether something holds on every process; each must ask."""
    if jax.process_count() == 1:
        return holds
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.asarray(holds))))


def same_everywhere(text: str) -> bool:
    """Whether all processes have the same text; each must ask."""
    if jax.process_count() == 1:
        return True
    from jax.experimental import multihost_utils

    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32)
    return bool(np.all(multihost_utils.process_allgather(digest) == digest))


def main_first(make: Callable[[], T]) -> T:
    """Calls `make` on process 0, then on all others: what it builds on disk is there when they look for it."""
    if is_main_process():
        made = make()
        barrier("main first")
        return made
    barrier("main first")
    return make()
