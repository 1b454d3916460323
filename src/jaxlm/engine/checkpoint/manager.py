"""Decides which checkpoints of a phase are saved, and when."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxlm.core.runtime import is_main_process
from jaxlm.core.stores import WHILE_TRAINING_S
from jaxlm.engine.checkpoint.manifest import Cursor, History
from jaxlm.engine.checkpoint.policy import CheckpointerConfig, SaveClock, is_permanent
from jaxlm.engine.checkpoint.writer import CheckpointWriter
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState

BEFORE_STREAK = "before_streak"
"""The purpose of the pin of the newest checkpoint from before the steps that the run may go back to before."""


class Saver:
    """Decides which checkpoints to save in a phase, and saves them.

    A save that fails while training goes on is made up for by a later one. Saves that end or begin a phase, an attempt or a
    run have nothing to go on with: they block until they are finished, and are repeated if they fail.

    Attributes:
        history: the run's history, which every checkpoint contains.
        holds: whether the run may go back: then the newest checkpoint from before this began is pinned.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        policy: CheckpointerConfig,
        phase: Phase,
        before_save: Sequence[Callable[[], None]],
        history: History,
        resumed: str | None = None,
    ):
        """Args:
        resumed: name of the checkpoint that the phase continues from; None if it is entered.
        """
        self.history = history
        self.holds = False
        self._writer = writer
        self._policy = policy
        self._phase = phase
        self._before_save = before_save
        self._clock = SaveClock(policy.save_interval)
        self._last_saved: int | None = None
        self._before_streak = history.pins.get(BEFORE_STREAK, resumed)
        self._kept: dict[str, _Kept] = {}
        # The pins of the history and `_before_streak`, which are right again if the save in progress fails.
        self._unsettled: tuple[Mapping[str, str], str | None] | None = None

    def due_by_clock(self) -> bool:
        """Tells whether a temporary checkpoint is due by process 0's clock; False on every other process.

        None is due in the pause after one that failed, or while another one is being written, unless every step is saved.

        Raises:
            SaveError: saves have been failing for too long.
        """
        if self._writer.is_busy:
            return is_main_process() and not self._policy.save_interval
        self._writer.wait()
        health = self._writer.health
        return is_main_process() and (health.retry_due() if health.is_failing else self._clock.due())

    def due_by_step(self, step: int) -> bool:
        """Tells whether the retention rules or a request of this step save a checkpoint."""
        return self.is_permanent(step) or any(kept.step == step for kept in self._kept.values())

    def is_permanent(self, step: int) -> bool:
        return is_permanent(self._policy.keep, step)

    def keep(self, purpose: str, step: int, controller: str | None = None) -> None:
        """Requests a checkpoint of this step, and pins it until the next such request or the phase's end.

        If that cannot be saved, the controller remembers again what it does now; without a controller, nothing follows.
        """
        before = None if controller is None else self.history.controllers.get(controller)
        self._kept[purpose] = _Kept(step, controller, before)

    def settle(self) -> None:
        """Waits for the save in progress. If it failed, the history is as if it had not been tried.

        All processes must call this at the same step, so that they act alike.
        """
        self._writer.wait()
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None or not self._writer.has_failed:
            return
        lost = {
            kept.controller: kept.before
            for kept in self._kept.values()
            if kept.controller is not None and kept.step == self._last_saved
        }
        memories = {name: memory for name, memory in {**self.history.controllers, **lost}.items() if memory is not None}
        pins, self._before_streak = unsettled
        self.history = replace(self.history, pins=pins, controllers=memories)
        self._last_saved = None

    def save(self, state: RunState, step: int, position: Mapping[str, Any], *, forced: bool) -> None:
        """Saves the state after `step`, unless that was just done. `forced`: the phase or the run ends here.

        Without `forced`, this starts the save and returns.
        """
        self.settle()
        if step == self._last_saved:
            return
        permanent = self.is_permanent(step) or (forced and step == self._phase.end)
        temporary = not (permanent or self._writer.health.is_owed)
        pauses = WHILE_TRAINING_S if forced else None
        self._write(state, step, position, entering=False, temporary=temporary, pauses_s=pauses)

    def save_end(self, state: RunState, step: int, position: Mapping[str, Any]) -> None:
        """Saves the state with which the phase ends, permanently."""
        self._kept.clear()
        self._write(state, step, position, entering=False, temporary=False, pauses_s=WHILE_TRAINING_S)

    def save_entry(self, state: RunState, position: Mapping[str, Any]) -> None:
        self._write(state, self._phase.start, position, entering=True, temporary=True, pauses_s=WHILE_TRAINING_S)

    def save_rewound(self, state: RunState, cursor: Cursor, position: Mapping[str, Any]) -> None:
        """Saves the state to which the run went back: from here on, a start resumes there.

        Args:
            cursor: the cursor of the checkpoint that the state was loaded from.
            position: the data position after the skipped batches.
        """
        for purpose in (purpose for purpose, name in self.history.pins.items() if name == cursor.folder_name):
            self.keep(purpose, cursor.step)  # the same state, in the attempt to whose checkpoints the run may go back
        saved_as = {"entering": cursor.entering, "temporary": True}
        self._write(state, cursor.step, position, **saved_as, pauses_s=WHILE_TRAINING_S)

    def _write(
        self,
        state: RunState,
        step: int,
        position: Mapping[str, Any],
        *,
        entering: bool,
        temporary: bool,
        pauses_s: Sequence[float] | None,
    ) -> None:
        """Args: pauses_s: between tries of a save that blocks; None only starts it."""
        self.settle()
        for act in self._before_save:
            act()
        cursor = Cursor(step, self._phase.index, self._phase.name, entering, temporary, self.history)
        self._unsettled = (self.history.pins, self._before_streak)
        self.history = replace(self.history, pins=self._pins(cursor))
        cursor = replace(cursor, history=self.history)
        if pauses_s is None:
            self._writer.start(state, cursor, position)
        else:
            self._writer.save(state, cursor, position, pauses_s)
        self._last_saved = step
        self._clock.reset()

    def _pins(self, cursor: Cursor) -> dict[str, str]:
        """Lists what to pin once the checkpoint at `cursor` is saved."""
        name = cursor.folder_name
        pins = {purpose: pinned for purpose, pinned in self.history.pins.items() if purpose != BEFORE_STREAK}
        pins |= {purpose: name for purpose, kept in self._kept.items() if kept.step == cursor.step}
        if not self.holds:
            self._before_streak = name
        elif self._before_streak is not None:
            pins[BEFORE_STREAK] = self._before_streak
        return pins


@dataclass(frozen=True)
class _Kept:
    """A step whose checkpoint a controller keeps.

    Attributes:
        before: what the controller remembered before it decided so; None if nothing.
    """

    step: int
    controller: str | None
    before: Any
