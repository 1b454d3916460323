"""Threads that take the part of a run's processes, with a stand-in for the key-value store of jax's coordination service."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxlm.core import runtime
from jaxlm.core.exchange import Exchange

_LIMIT_S = 120


class Service:
    """Like the store, it has no value twice, and whoever asks for a value waits for it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        with self._changed:
            assert key not in self.values, f"ALREADY_EXISTS: {key}"
            self.values[key] = value
            self._changed.notify_all()

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.values = {name: value for name, value in self.values.items() if not name.startswith(key)}

    def key_value_dir_get_bytes(self, prefix: str) -> list[tuple[str, bytes]]:
        with self._changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, min(timeout_in_ms / 1000, 0.05)):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return self.values[key]


def together(*acts: Callable[[], Any], service: Service | None = None) -> list[Any]:
    """What each process returns, or the exception that it raises. They all run at once."""
    store, local = service or Service(), threading.local()
    ends: list[Any] = [None] * len(acts)

    def process(index: int) -> None:
        local.exchange = Exchange(store, index, len(acts))
        try:
            ends[index] = acts[index]()
        except BaseException as error:
            ends[index] = error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "exchange", lambda: local.exchange)
        patch.setattr(jax, "process_count", lambda: len(acts))
        patch.setattr(jax, "process_index", lambda: local.exchange.index)
        threads = [threading.Thread(target=process, args=(index,), daemon=True) for index in range(len(acts))]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _LIMIT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a process waits for ever"
    return ends
