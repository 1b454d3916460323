"""The training loop: runs the compiled step on batches until the phase is done or the run is asked to stop."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxlm.data.base import Batches
from jaxlm.engine.activity import Activity, ActivityClock
from jaxlm.engine.checkpoint.manager import Saver
from jaxlm.engine.control import Control
from jaxlm.engine.hooks import Hooks
from jaxlm.engine.metrics import AsyncMetrics
from jaxlm.engine.outcome import Done, Interrupted, Outcome
from jaxlm.engine.phases import Phase
from jaxlm.engine.rescue import Rescue
from jaxlm.engine.state import RunState
from jaxlm.engine.step import StepReport
from jaxlm.engine.sync import FlagSync

PAUSE = "jaxlm.pause"


def pause() -> jax.profiler.TraceAnnotation:
    """Marks time in which the loop waits for hooks and saves, so that profiles do not count it as idle time."""
    return jax.profiler.TraceAnnotation(PAUSE)


@dataclass(frozen=True)
class OpenPhase:
    """A phase with everything that its loop needs.

    Attributes:
        train_step: (state, batch, flags) -> (state, report); the state is donated.
    """

    phase: Phase
    train_step: Callable[[RunState, Any, jax.Array], tuple[RunState, StepReport]]
    batches: Batches
    metrics: AsyncMetrics
    control: Control
    saver: Saver
    flag_sync: FlagSync
    clock: ActivityClock
    hooks: Hooks = field(default_factory=Hooks)


def run_phase(state: RunState, at: OpenPhase) -> tuple[RunState, Outcome]:
    """Trains from the state's step to the end of the phase, until the state was saved after a signal, or until a controller
    ends the phase or makes the run go back. Steps that were dispatched after its last one are neither logged nor saved.
    """
    batches, metrics, saver, flag_sync, clock = at.batches, at.metrics, at.saver, at.flag_sync, at.clock
    step = int(state.step)
    rescue = Rescue(batches, metrics, saver, clock, step)
    first = True
    while step < at.phase.end:
        if at.control.is_due(step):
            state, ended = at.control.take_effect(state, step)
            if ended is not None:
                metrics.drain()
                return state, metrics.rewind or ended
        if batches.due(step):
            metrics.drain()  # the run may go back, and the time that follows belongs to no step
            if metrics.rewind is not None:
                return state, metrics.rewind
            with rescue.between(state, step), pause(), clock.during(Activity.ROLLOUT):
                batches.refresh(state.model, step)
            metrics.skip_time()
        started = time.perf_counter()
        with rescue.between(state, step), clock.during(Activity.DATA):
            batch = next(batches)
        loading_s = time.perf_counter() - started
        state, report = at.train_step(state, batch, flag_sync.raised(save=saver.due_by_clock()))
        if not batches.due(step + 1):
            batches.read_ahead()  # loads the next batch while this thread waits for the devices
        step += 1
        metrics.push(step, report, loading_s, batches.metrics())
        agreed = flag_sync.agreed(metrics.flags, save=saver.due_by_clock())
        ending = step == at.phase.end or bool(agreed.stop)
        due = at.hooks.due(step)
        saving = ending or agreed.save or saver.due_by_step(step)
        if due or saving:
            metrics.drain()
        if metrics.rewind is not None:
            return state, metrics.rewind
        if due or saving:
            with pause():
                for hook in due:
                    with clock.during(hook.activity):
                        hook.run(step, state)
                        decided = at.control.after_evaluation(step) if hook is at.hooks.evaluations else None
                    if decided is not None:
                        return state, decided
                if saving or saver.due_by_step(step):  # a controller may have asked for it
                    with clock.during(Activity.SAVE):
                        saver.save(state, step, batches.state(), forced=ending)
                    metrics.flags = None  # this save satisfies the requests made before it
            metrics.skip_time()
        if first:
            first = False
            gc.collect()
            gc.freeze()  # these objects live to the end of the run; scanning them again would only stall steps
        if agreed.stop:
            return state, Interrupted(agreed.stop)
    return state, Done()
