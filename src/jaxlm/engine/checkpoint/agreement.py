"""How the processes of a run tell each other whether their part of a save worked.

Through the key-value store of jax's coordination service: at a barrier, the others would wait for a process that has failed
until the barrier's timeout.
"""

import time
from typing import Any

import jax

from jaxlm.core.runtime import is_main_process

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.05, 1.0
_WORKED = "worked"


class Agreement:
    """Messages between the processes about one save. All processes must number their saves alike. One process sends none."""

    def __init__(self, number: int):
        """Args: number: which save of this start it is, from 0."""
        from jax._src import distributed  # there is no public way to the client; Orbax uses it too

        self._client: Any = distributed.global_state.client if jax.process_count() > 1 else None
        self._folder = _folder(number)
        if self._client is not None and is_main_process():
            # A process that takes part in the save before this one has read what was said about the one before that.
            self._client.key_value_delete(_folder(number - 2))

    def tell(self, stage: str, failure: str) -> None:
        """Says how a stage ended on this process. Args: failure: empty if it worked."""
        if self._client is not None:
            self._client.key_value_set(f"{self._folder}{stage}/{jax.process_index()}", failure or _WORKED)

    def hear(self, stage: str, processes: int) -> str:
        """Waits until the first `processes` processes have said how a stage ended. Returns a failure; empty if all worked."""
        if self._client is None:
            return ""
        folder, began = f"{self._folder}{stage}/", time.monotonic()
        while len(outcomes := self._outcomes(folder, processes)) < processes:
            # A long save is not asked about often: all processes ask the same service.
            time.sleep(min(max(_SHORTEST_POLL_S, 0.1 * (time.monotonic() - began)), _LONGEST_POLL_S))
        failures = [f"process {number}: {text}" for number, text in sorted(outcomes.items()) if text != _WORKED]
        return failures[0] if failures else ""

    def _outcomes(self, folder: str, processes: int) -> dict[int, str]:
        outcomes = {int(key.rpartition("/")[2]): text for key, text in self._client.key_value_dir_get(folder)}
        return {number: text for number, text in outcomes.items() if number < processes}


def _folder(number: int) -> str:
    return f"jaxlm/saves/{number}/"
