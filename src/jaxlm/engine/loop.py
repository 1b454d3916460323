"""The training loop: runs the compiled step on batches until the phase is done or the run is asked to stop."""

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxlm.controllers.base import Branch
from jaxlm.core.values.logged import Activity
from jaxlm.engine.branch import BranchStopped, branch_end, run_branch
from jaxlm.engine.hooks import Hook
from jaxlm.engine.open_phase import OpenPhase
from jaxlm.engine.save_on_error import AT_THE_END, SaveOnError
from jaxlm.engine.state import RunState
from jaxlm.engine.sync import Done, Interrupted, Outcome

PAUSE = "jaxlm.pause"


def pause() -> jax.profiler.TraceAnnotation:
    """Marks time in which the loop waits for hooks and saves, so that profiles do not count it as idle time."""
    return jax.profiler.TraceAnnotation(PAUSE)


class TrainingLoop:
    """Trains from the state's step to the end of the phase, until the state was saved after a signal, or until a controller
    ends the phase or makes the run go back. Steps that were dispatched after its last one are neither logged nor saved.

    Attributes:
        state: after the last step that was dispatched.
        step: that step.
    """

    def __init__(self, state: RunState, at: OpenPhase):
        self.state, self.step = state, int(state.step)
        self._at = at
        self._on_error = SaveOnError(at.batches, at.metrics, at.saver, at.clock, self.step)
        self._is_first = True

    def run(self) -> tuple[RunState, Outcome]:
        """The state after the last step, and how the phase ended."""
        outcome = self._run_missed_hooks()
        while outcome is None and (before := self.step) < self._at.phase.end:
            outcome = self._take_effect() or self._advance() or self._between(before)
        return self.state, outcome or Done()

    def _run_missed_hooks(self) -> Outcome | None:
        """Runs the hooks that an earlier start has not, because the first of them has failed."""
        saver = self._at.saver
        if (num_run := saver.history.hooks_run) is None:
            return None
        saver.history = replace(saver.history, hooks_run=None)
        with pause():
            return self._run_hooks(self._at.hooks.due(self.step), num_run)

    def _take_effect(self) -> Outcome | None:
        """Puts due controls into the state. Returns how the phase ends, if it ends here."""
        at = self._at
        if not at.control.is_due(self.step):
            return None
        self.state, ended = at.control.take_effect(self.state, self.step)
        return None if ended is None else at.metrics.drain() or ended

    def _advance(self) -> Outcome | None:
        """Takes a step, or several in a branch. Returns how the phase ends, if it ends before or in them."""
        branch = self._at.control.branch(self.step)
        end = None if branch is None else branch_end(branch, self.step, self._at)
        return self._take_step() if branch is None or end is None else self._take_branch(branch, end)

    def _take_step(self) -> Outcome | None:
        at, batches, clock = self._at, self._at.batches, self._at.clock
        if batches.due(self.step):
            if (rewind := at.metrics.drain()) is not None:
                return rewind
            with self._on_error.between(lambda: self.state, self.step), pause(), clock.during(batches.refreshes_as):
                batches.refresh(self.state.model, self.step)
            at.metrics.skip_time()  # it belongs to no step
        started = time.perf_counter()
        with self._on_error.between(lambda: self.state, self.step), clock.during(Activity.DATA):
            batch = next(batches)
        loading_s = time.perf_counter() - started
        flags = at.flag_sync.raised(save=at.saver.due_by_clock())
        self.state, report = at.train_step(self.state, batch, flags)
        if not batches.due(self.step + 1):
            batches.read_ahead()  # loads the next batch while this thread waits for the devices
        self.step += 1
        at.metrics.push(self.step, report, loading_s, batches.metrics())
        return None

    def _take_branch(self, branch: Branch, end: int) -> Outcome | None:
        at = self._at
        if (rewind := at.metrics.drain()) is not None:
            return rewind
        with pause(), at.clock.during(Activity.BRANCH):
            result = run_branch(branch, self.state, self.step, end, at, self._on_error)
        self.state = result.state
        if isinstance(result, BranchStopped):
            with at.clock.during(Activity.SAVE):
                at.saver.save(self.state, self.step, at.batches.state(), forced=True)
            return Interrupted(result.signal)
        at.control.branched(end, branch, result.branched)  # before its steps may send the run back
        for step, taken in enumerate(result.taken, self.step + 1):
            seconds = result.seconds / len(result.taken)
            at.metrics.push(step, taken.report, taken.loading_s, taken.of_batch, seconds=seconds)
        self.step = end
        if (rewind := at.metrics.drain()) is not None:
            return rewind
        self.state, ended = at.control.take_effect(self.state, end)
        return ended

    def _between(self, before: int) -> Outcome | None:
        """Does what is due between two steps. Args: before: the step before those that were just taken."""
        at, step = self._at, self.step
        agreed = at.flag_sync.agreed(at.metrics.flags, save=at.saver.due_by_clock())
        ending = step == at.phase.end or bool(agreed.stop)
        due = at.hooks.due(step, since=before)
        saving = ending or agreed.save or at.saver.due_by_step(step)
        if due or saving:
            at.metrics.drain()
        if at.metrics.rewind is not None:
            return at.metrics.rewind
        if due or saving:
            with pause():
                if (decided := self._run_hooks(due)) is not None:
                    return decided
                if saving or at.saver.due_by_step(step):  # a controller may have asked for it
                    with at.clock.during(Activity.SAVE):
                        at.saver.save(self.state, step, at.batches.state(), forced=ending)
                    at.metrics.flags = None  # this save satisfies the requests made before it
            at.metrics.skip_time()
        if self._is_first:
            self._is_first = False
            gc.collect()
            gc.freeze()  # these objects live to the end of the phase; scanning them again would only stall steps
        return Interrupted(agreed.stop) if agreed.stop else None

    def _run_hooks(self, due: Sequence[Hook], num_run: int = 0) -> Outcome | None:
        """Args: due: all hooks of this step. num_run: how many of them have run already."""
        at = self._at
        is_end = self.step == at.phase.end  # from where a start enters the next phase, or is complete
        for number, hook in enumerate(due[num_run:], num_run):
            missed: dict[str, Any] = {"place": AT_THE_END} if is_end else {"hooks_run": number}
            with at.clock.during(hook.activity):
                with self._on_error.between(lambda: self.state, self.step, **missed):
                    hook.run(self.step, self.state)
                decided = at.control.after_evaluation(self.step) if hook is at.hooks.evaluations else None
            if decided is not None:
                return decided
        return None
