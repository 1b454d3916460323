"""The loop: batches through the compiled step, until the phase is done or somebody asks to stop."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxlm.data.base import Batches
from jaxlm.engine.checkpoint.manager import Saver
from jaxlm.engine.metrics import AsyncMetrics
from jaxlm.engine.phases import Phase
from jaxlm.engine.signals import StopRequest
from jaxlm.engine.state import RunState
from jaxlm.engine.sync import FlagSync, SyncFlags


@dataclass(frozen=True)
class Done:
    """All steps of the phase are done."""


@dataclass(frozen=True)
class Interrupted:
    """A signal asked to stop; the state was saved first.

    Attributes:
        signal: its number; the process exits with 128 + this.
    """

    signal: int


Outcome = Done | Interrupted


class Hook(Protocol):
    """Something that looks at the state between two steps and cannot change it."""

    def due(self, step: int) -> bool:
        """Whether to run after this step; the same answer on every process."""
        ...

    def run(self, step: int, state: RunState) -> None:
        """Looks. All steps up to this one have been logged."""
        ...


PAUSE = "jaxlm.pause"


def pause() -> jax.profiler.TraceAnnotation:
    """Around what the loop stands still for, once the devices are done: a profile then tells it from idle time."""
    return jax.profiler.TraceAnnotation(PAUSE)


def run_phase(
    state: RunState,
    phase: Phase,
    train_step: Callable[[RunState, Any, jax.Array], tuple[RunState, Any]],
    batches: Batches,
    *,
    metrics: AsyncMetrics,
    hooks: Sequence[Hook],
    saver: Saver,
    flag_sync: FlagSync,
    stop: StopRequest,
) -> tuple[RunState, Outcome]:
    """Trains from where the state stands to the end of the phase.

    Returns:
        The state, and `Done`, or `Interrupted` after the state was saved.
    """
    step = int(state.step)
    first = True
    while step < phase.end:
        waiting_since = time.perf_counter()
        batch = next(batches)
        loading_s = time.perf_counter() - waiting_since
        flags = SyncFlags(stop=stop.signal, save=saver.due_by_clock())
        state, report = train_step(state, batch, flag_sync.to_devices(flags))
        batches.read_ahead()  # while this thread waits for the devices
        step += 1
        metrics.push(step, report, loading_s)
        agreed = flag_sync.agreed(SyncFlags(stop=stop.signal, save=saver.due_by_clock()), metrics.flags)
        ending = step == phase.end or bool(agreed.stop)
        due = [hook for hook in hooks if hook.due(step)]
        saving = ending or agreed.save or saver.due_by_step(step)
        if due or saving:
            metrics.drain()
            with pause():
                for hook in due:
                    hook.run(step, state)
                if saving:
                    saver.save(state, step, batches.state(), forced=ending)
                    metrics.flags = None  # flags that were set before this save have been acted on
            metrics.skip_time()
        if first:
            first = False
            gc.collect()
            gc.freeze()  # what lives now lives to the end; looking at it again would only stall a step
        if agreed.stop:
            return state, Interrupted(agreed.stop)
    return state, Done()
