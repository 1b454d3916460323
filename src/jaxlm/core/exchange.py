"""What the processes of a run tell each other, through the key-value store of jax's coordination service.

Not through arrays: a collective works only if all processes have the same devices, options and program, which is what they
have to find out first. One that does not work waits, or ends in an error that does not say why.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

_WAIT_MS = 10_000  # for one answer; then it asks again. engine/peers.py ends those that wait for a lost process
T = TypeVar("T")
_ROOT = "jaxlm/exchange/"


class Exchange:
    """Exchanges of bytes, one after another. All processes must take part in each, in the same order."""

    def __init__(self, client: Any, index: int, count: int, root: str = _ROOT):
        """Args:
        client: of jax's coordination service.
        index, count: this process, and the number of processes.
        root: prefix of the keys.
        """
        self._client, self.index, self._count, self._root = client, index, count, root
        self._number = 0
        self._kept = 0  # the first exchange whose keys are still there

    def conclude(self, message: bytes, conclusion: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Returns what process 0 concludes from the bytes of all processes, on every process.

        Args:
            message: what this process has to say.
            conclusion: of what all processes said, in their order. Process 0 calls it.
        """
        number = self._next()
        prefix, concluded = f"{self._root}{number}/said/", f"{self._root}{number}/concluded"
        if self.index:
            self._client.key_value_set_bytes(f"{prefix}{self.index}", message)
            return self._wait_for(concluded)
        others = self._wait_for_others(prefix)
        for read in range(self._kept, number):  # whoever takes part in this exchange has read those before
            self._client.key_value_delete(f"{self._root}{read}/")
        self._kept = number
        result = conclusion([message, *others])
        self._client.key_value_set_bytes(concluded, result)
        return result

    def announce(self, result: bytes) -> None:
        """On process 0: what the others get from their next `conclude`. Does not wait for them."""
        self._client.key_value_set_bytes(f"{self._root}{self._next()}/concluded", result)

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number

    def _wait_for_others(self, prefix: str) -> list[bytes]:
        numbers = range(1, self._count)
        while True:
            messages = {int(key.rpartition("/")[2]): text for key, text in self._client.key_value_dir_get_bytes(prefix)}
            missing = next((number for number in numbers if number not in messages), None)
            if missing is None:
                return [messages[number] for number in numbers]
            self._wait_for(f"{prefix}{missing}")

    def _wait_for(self, key: str) -> bytes:
        while True:
            try:
                return self._client.blocking_key_value_get_bytes(key, _WAIT_MS)
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith("DEADLINE_EXCEEDED"):
                    raise


class _Work(threading.local):
    is_alone = False  # whether this process does what the others do not


WORK = _Work()


def alone(act: Callable[[], T]) -> T:
    """Calls what only this process does."""
    before, WORK.is_alone = WORK.is_alone, True
    try:
        return act()
    finally:
        WORK.is_alone = before


def coordination() -> Any | None:
    """jax's coordination service, as `client`, `process_id` and `num_processes`; None for a single process. It needs no
    devices: none may have been opened yet.
    """
    from jax._src import distributed  # there is no public way to the client; Orbax uses it too

    state = distributed.global_state
    return None if state.client is None or state.num_processes == 1 else state


def exchange() -> Exchange | None:
    """Of all facts, between the processes of this run; None for a single process."""
    if (service := coordination()) is None:
        return None
    return _exchange(service.client, service.process_id, service.num_processes)


_exchange = functools.lru_cache(maxsize=4)(Exchange)


def exchange_about(what: str, number: int) -> Exchange | None:
    """About one thing of a kind that comes again, by its number from 0, in a thread of its own; None for a single process.

    A process that leaves out, or fails in, one of them takes part in the next one all the same.
    """
    if (service := coordination()) is None:
        return None
    if service.process_id == 0:
        # Whoever takes part in the one before this has read what was said about the one before that.
        service.client.key_value_delete(f"jaxlm/{what}/{number - 2}/")
    return Exchange(service.client, service.process_id, service.num_processes, f"jaxlm/{what}/{number}/")
