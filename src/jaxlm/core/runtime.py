"""The processes of a run: jax's options in each, waiting for them, talking about process 0."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import numpy as np

from jaxlm.core.errors import ConfigError, PeerError

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


def broadcast_from_main(values: np.ndarray) -> np.ndarray:
    """Process 0's small array, on every process."""
    if jax.process_count() == 1:
        return values
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.broadcast_one_to_all(values))


def all_processes(holds: bool) -> bool:
    """Whether something holds on every process; each must ask."""
    if jax.process_count() == 1:
        return holds
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.asarray(holds))))


def same_on_all_processes(text: str) -> bool:
    """Whether all processes have the same text; each must ask."""
    if jax.process_count() == 1:
        return True
    from jax.experimental import multihost_utils

    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32)
    return bool(np.all(multihost_utils.process_allgather(digest) == digest))


def main_only(act: Callable[[], T]) -> T | None:
    """Calls `act` on process 0 while the others wait; they get None.

    Raises:
        BaseException: what `act` raises, on process 0.
        ConfigError, PeerError: the same message, on all others: they end with it instead of waiting for what never comes.
    """
    if jax.process_count() == 1:
        return act()
    made, news = None, np.zeros(_NEWS_BYTES, np.uint8)
    if is_main_process():
        try:
            made = act()
        except BaseException as failure:
            broadcast_from_main(_news_of(failure))
            raise
    told = broadcast_from_main(news)
    if told[0] != _ALL_WELL:
        raise _failure_told(told)
    return made


def main_first(make: Callable[[], T]) -> T:
    """Calls `make` on process 0, then on all others: what it builds on disk is there when they look for it.

    Raises:
        BaseException: what `make` raises, where it does.
        ConfigError, PeerError: on all other processes, which would otherwise wait for that one.
    """
    made = main_only(make)
    if jax.process_count() > 1:
        try:
            made = made if is_main_process() else make()
        except BaseException:
            all_processes(False)
            raise
        if not all_processes(True):
            raise PeerError("another process has failed; its own output says why")
    return cast(T, made)


# What process 0 tells the others: one byte for the kind, then text.
_NEWS_BYTES = 4096
_ALL_WELL, _CONFIG, _OTHER = range(3)


def _news_of(failure: BaseException) -> np.ndarray:
    kind = _CONFIG if isinstance(failure, ConfigError) else _OTHER
    text = str(failure) if kind == _CONFIG else f"{type(failure).__name__}: {failure}"
    raw = bytes([kind]) + text.encode()[: _NEWS_BYTES - 1]
    return np.frombuffer(raw.ljust(_NEWS_BYTES, b"\0"), np.uint8)


def _failure_told(news: np.ndarray) -> Exception:
    text = "process 0: " + news[1:].tobytes().rstrip(b"\0").decode(errors="ignore")
    return ConfigError(text) if news[0] == _CONFIG else PeerError(text)
