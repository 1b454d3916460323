"""Leads a run through its phases: what each one starts from, and what follows from how it ended.

Done         the next phase starts from the state
Next         the next phase starts from the state, or from the weights that were pinned
Rewind       the phase goes on from an earlier checkpoint, with the data after the steps that it abandons
Interrupted  the run ends; the same command continues it
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import equinox as eqx
import jax
import numpy as np

from jaxlm.core.runtime import main_first
from jaxlm.core.sharding import Layout
from jaxlm.core.values.logged import Activity
from jaxlm.engine.checkpoint.manifest import CheckpointName, History
from jaxlm.engine.checkpoint.restore import VerifiedCheckpoint, newest_undamaged, restore_state
from jaxlm.engine.checkpoint.store import CheckpointFolder
from jaxlm.engine.entry import StateBuilder
from jaxlm.engine.open_phase import OpenPhase
from jaxlm.engine.phases import Phase
from jaxlm.engine.save_on_error import AT_THE_END, SaveOnError
from jaxlm.engine.state import RunState, on_devices
from jaxlm.engine.sync import Done, Interrupted, Next, Outcome, Rewind


class RewindError(Exception):
    """The run cannot go back: it has done so too often, or there is no undamaged checkpoint to go back to."""


class PhaseRunner:
    """The place of a run in its phases. All processes act in the same way.

    Attributes:
        state_builder: its phases end where they really ended.
        history: the run's history at the start of the current phase, or after going back in it.
        resumed: the checkpoint from which the current phase goes on; None if it is entered.
        num_skipped: number of steps after `resumed` whose batches are skipped, because the run has just gone back.
    """

    def __init__(
        self,
        state_builder: StateBuilder,
        layout: Layout,
        folder: CheckpointFolder,
        log: Callable[[str], None],
        start: VerifiedCheckpoint | None,
        history: History,
    ):
        """Args: start: the checkpoint from which the run starts; None for a new run."""
        self.state_builder = state_builder
        self.history = history
        self.resumed = start
        self.num_skipped = 0
        self._layout = layout
        self._folder = folder
        self._log = log
        self._index = 0
        if start is not None:
            self._index = start.cursor.phase
            if start.cursor.step == state_builder.phases[self._index].end:
                self._enter_next(history)

    @property
    def phase(self) -> Phase | None:
        """The current phase; None after the last one."""
        phases = self.state_builder.phases
        return phases[self._index] if self._index < len(phases) else None

    def act(self, outcome: Outcome, state: RunState, ended: OpenPhase) -> RunState:
        """Does what follows from the outcome of a phase, and returns the state from which the run goes on.

        The buffers of `state` are deleted if another state is loaded.

        Raises:
            RewindError: the run cannot go back.
        """
        ended.saver.settle()
        match outcome:
            case Done():
                self._enter_next(ended.saver.history)
            case Next():
                return self._end_early(outcome, state, ended)
            case Rewind():
                return self._go_back(outcome, state, ended)
            case Interrupted():
                pass
        return state

    def _enter_next(self, history: History) -> None:
        self._index += 1
        self.resumed = None
        self.num_skipped = 0
        self.history = _in_phase(self.phase, history)

    def _end_early(self, outcome: Next, state: RunState, ended: OpenPhase) -> RunState:
        """Ends the phase with the pinned or the current weights, and saves them as its last checkpoint."""
        phase, saver = ended.phase, ended.saver
        step, history = int(state.step), saver.history
        weights = None if outcome.weights is None else history.pins.get(outcome.weights)
        self._log(f"phase '{phase.name}' ends after step {step}: {outcome.reason}")
        if weights is not None:
            skipped = int(state.guard.skipped)
            best, state = self._load([weights], state, phase)
            self._log(f"going on with the weights of {best.location}")
            counts = [on_devices(np.int32(count), self._layout) for count in (step, skipped)]
            state = eqx.tree_at(lambda s: (s.step, s.guard.skipped), state, counts)
        if step != phase.end:
            ends = (*(earlier.end for earlier in self.state_builder.phases[: phase.index]), step)
            self.state_builder = self.state_builder.with_phase_ends(ends)
            history = replace(history, phase_ends=ends)
        is_last = phase.index + 1 == len(self.state_builder.phases)
        saver.history = _in_phase(None if is_last else self.state_builder.phases[phase.index + 1], history)
        on_error = SaveOnError(ended.batches, ended.metrics, saver, ended.clock, phase.start, ends=True)
        with on_error.between(lambda: state, step, place=AT_THE_END):
            if weights is not None and (evaluations := ended.hooks.evaluations) is not None:
                with ended.clock.during(evaluations.activity):
                    evaluations.run_at_early_end(step, state)
            for export in ended.hooks.exports:
                with ended.clock.during(export.activity):
                    export.run(step, state)
        with ended.clock.during(Activity.SAVE):
            saver.save_end(state, step, ended.batches.state())
        self._enter_next(saver.history)
        return state

    def _go_back(self, outcome: Rewind, state: RunState, ended: OpenPhase) -> RunState:
        """Loads the newest checkpoint from before the steps that the run goes back to before."""
        phase, history = ended.phase, ended.saver.history
        num_rewinds = history.num_rewinds(outcome.limit_key)
        if outcome.max_rewinds is not None and num_rewinds >= outcome.max_rewinds:
            raise RewindError(
                f"{outcome.reason}, but the run may not go back again: it has done so {num_rewinds} of"
                f" {outcome.max_rewinds} times ({outcome.limit_key}). Look at the data and the gradient norms"
                " of these steps, lower the learning rate, or raise max_rewinds"
            )
        names = [name for name in main_first(self._folder.names) if _precedes(name, outcome, phase, history.attempt)]
        pinned = [name for name in names if name in {history.pins.get(purpose) for purpose in outcome.purposes}]
        names = pinned or names
        self.resumed, state = self._load(names, state, phase)
        self.num_skipped = outcome.last - self.resumed.cursor.step
        cursor = self.resumed.cursor
        controllers = ended.control.after_rewind(cursor.history.controllers, cursor.step)
        self.history = history.rewound(self.num_skipped, controllers, outcome.limit_key)
        most = "" if outcome.max_rewinds is None else f" of at most {outcome.max_rewinds}"
        self._log(
            f"{outcome.reason}: going back to {self.resumed.location} and past the data of the {self.num_skipped} steps"
            f" since (attempt {num_rewinds + 1}{most})"
        )
        return state

    def _load(self, names: Sequence[str], state: RunState, phase: Phase) -> tuple[VerifiedCheckpoint, RunState]:
        """The newest undamaged one of the checkpoints `names`, and its state, which replaces `state` on the devices."""
        checkpoint = newest_undamaged(self._folder, names, self._log)
        if checkpoint is None:
            raise RewindError(
                f"phase '{phase.name}' has no undamaged checkpoint in {self._folder} to go back to, of"
                f" {', '.join(names) or 'none'}. Start the same command again to continue from the newest checkpoint"
            )
        for array in jax.tree.leaves(state):
            array.delete()
        return checkpoint, restore_state(checkpoint, self.state_builder, phase, self._layout, self._log)


def _in_phase(phase: Phase | None, history: History) -> History:
    """The history at the start of a phase. Args: phase: None after the last one; history: at the end of the one before."""
    names: set[str] = set()
    if phase is not None and phase.schedule_start is not None:
        names = {controller.name for controller in phase.controllers if controller.persistence.follows_schedule}
    staying = {name: memory for name, memory in history.controllers.items() if name in names}
    return replace(history.in_next_phase(), controllers=staying)


def _precedes(name: str, rewind: Rewind, phase: Phase, attempt: int) -> bool:
    """Tells whether a checkpoint is from this attempt and phase, and from before the steps to go back to before."""
    parsed = CheckpointName.parse(name)
    if parsed is None or parsed.attempt != attempt or not phase.start <= parsed.step < rewind.first:
        return False
    return parsed.step > phase.start or parsed.entering == (phase.index > 0)
