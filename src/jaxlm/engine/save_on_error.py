"""Saves the last complete step when what follows it fails: the next batch (a reward, a file), an evaluation or an export."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxlm.controllers.base import StopRunError
from jaxlm.core.errors import ConfigError, PeerError
from jaxlm.core.exchange import coordination
from jaxlm.core.values.logged import Activity
from jaxlm.data.base import Batches
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.checkpoint.lease import LeaseLostError
from jaxlm.engine.checkpoint.manager import Saver
from jaxlm.engine.checkpoint.store import SaveError
from jaxlm.engine.metrics import AsyncMetrics, NonFiniteError
from jaxlm.engine.peers import is_lost_peer
from jaxlm.engine.state import RunState

AT_THE_END = ", after the evaluations and exports of this step (see jaxlm evaluate and jaxlm convert)"

_OTHERS_S = 30.0  # until a process that has failed assumes that the others have not
_POLL_S = 0.05
_UNSAVED = "After that, the last step could not be saved"


@dataclass(frozen=True)
class SaveOnError:
    """Between two steps, the state and the position of the data belong together, so they can be saved.

    A process that fails alone cannot save: the others are in the next step already, and its results are not complete.

    Attributes:
        first_step: the step of the state with which the phase has begun or goes on, which is saved already.
        ends: whether the state is the one with which the phase ends early.
    """

    batches: Batches
    metrics: AsyncMetrics
    saver: Saver
    clock: ActivityClock
    first_step: int
    ends: bool = field(default=False, kw_only=True)

    @contextlib.contextmanager
    def between(
        self, state: Callable[[], RunState], step: int, *, hooks_run: int | None = None, place: str = ""
    ) -> Iterator[None]:
        """Inside the block, the batch after `step` is made, or a hook runs. If that fails, the state is saved, and the error
        says so.

        Args:
            state: returns the state after `step`, with the batches at its place; called only if the block has failed.
            hooks_run: number of hooks that have run after `step`; the next start begins with the one that has failed.
            place: where the next start continues, for the message, if it is behind hooks that do not run again.

        Raises:
            SaveError: the state cannot be saved either.
        """
        try:
            yield
        except Exception as error:
            if is_lost_peer(error):
                raise
            try:
                note = self._save(state(), step, hooks_run, place)
            except SaveError as failed:
                raise SaveError(
                    f"{str(error).removesuffix('.')}. {_UNSAVED}: {failed.reason}", failed.advice
                ) from error
            except (LeaseLostError, NonFiniteError, StopRunError) as failed:  # the cause of all must still be told
                note = f"{_UNSAVED}: {failed}"
            for kind in (ConfigError, PeerError):
                if isinstance(error, kind):
                    raise kind(f"{str(error).removesuffix('.')}. {note}") from error
            error.add_note(note)
            raise

    def _save(self, state: RunState, step: int, hooks_run: int | None, place: str) -> str:
        """Saves the state, if that is possible. Returns what a start continues from, for messages."""
        if not _all_have_failed(f"jaxlm/on_error/{self.saver.history.attempt}-{step}/"):
            return (
                "Not all processes of the run have failed after this step, so it could not be saved. The same command"
                " continues from the newest checkpoint"
            )
        self.metrics.drain()
        if self.metrics.rewind is not None:
            return (
                "The last steps were not saved, because their updates were skipped. The same command continues from the"
                " newest checkpoint"
            )
        if step > self.first_step:
            if hooks_run is not None:
                self.saver.history = replace(self.saver.history, hooks_run=hooks_run)
            with self.clock.during(Activity.SAVE):
                if self.ends:
                    self.saver.save_end(state, step, self.batches.state())
                else:
                    self.saver.save(state, step, self.batches.state(), forced=True)
        return f"The run is saved at step {step}: the same command continues from there{place}"


def _all_have_failed(folder: str) -> bool:
    """Tells whether all processes say that they have failed at the same place.

    Args:
        folder: of the place, in the key-value store of jax's coordination service.
    """
    if (service := coordination()) is None:
        return True
    try:
        return _agree(service.client, folder, service.process_id, service.num_processes)
    except jax.errors.JaxRuntimeError:  # process 0, which hosts the service, is gone
        return False


def _agree(client: Any, folder: str, index: int, count: int) -> bool:
    """The same, with the client of the store. An error of process 0 reaches the others at once, as they wait for it."""
    client.key_value_set(f"{folder}{index}", "", allow_overwrite=True)
    until = time.monotonic() + _OTHERS_S
    while len(client.key_value_dir_get(folder)) < count:
        if time.monotonic() > until:
            client.key_value_delete(f"{folder}{index}")  # a process that fails later must not count on this one
            return False
        time.sleep(_POLL_S)
    return True
