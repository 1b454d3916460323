"""Runs a branch: tries candidates from one state, over the same batches, and goes on from the one with the lowest loss.

    state after s --+-- candidate 1, steps s + 1 to e -- loss on held-out batches
                    +-- candidate 2, steps s + 1 to e -- loss on held-out batches
                        ...                              the winner's state is the state of the run after e

While a candidate trains, the state from which it began is in the memory of the host, and so is the best one so far: the
devices need no more memory than for a step. Nothing is saved or evaluated in between, so a branch ends where an evaluation,
an export or a permanent checkpoint is due. A run that is stopped or killed in a branch continues from before it, and decides
the same again.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxlm.controllers.base import Branch, Branched
from jaxlm.engine.metrics import MAX_IN_FLIGHT
from jaxlm.engine.open_phase import OpenPhase
from jaxlm.engine.save_on_error import SaveOnError
from jaxlm.engine.state import RunState
from jaxlm.engine.step import StepReport


@dataclass(frozen=True)
class TakenStep:
    """A step of a branch.

    Attributes:
        loading_s: seconds that the host waited for its batch.
        of_batch: metrics that the host knows of its batch.
    """

    report: StepReport
    loading_s: float
    of_batch: Mapping[str, float]


@dataclass(frozen=True)
class BranchResult:
    """Describes where a run is after a branch.

    Attributes:
        state: the winner's.
        taken: the winner's steps.
        seconds: what the branch took.
    """

    state: RunState
    branched: Branched
    taken: list[TakenStep]
    seconds: float


@dataclass(frozen=True)
class BranchStopped:
    """A signal ended a branch.

    Attributes:
        state: from before the branch.
    """

    state: RunState
    signal: int


class _Stop(Exception):
    def __init__(self, signal: int):
        self.signal = signal


def branch_end(branch: Branch, step: int, at: OpenPhase) -> int | None:
    """The step after which a branch ends that begins after `step`; None if it should wait, because something needs the state
    in the middle of it. What comes so often that there is never enough room shortens it."""
    full = min(step + branch.num_steps, at.phase.end)
    end = next((later for later in range(step + 1, full) if at.is_fixed(later)), full)
    return end if end == full or at.is_fixed(step) or step == at.phase.start else None


def run_branch(
    branch: Branch, state: RunState, step: int, end: int, at: OpenPhase, on_error: SaveOnError
) -> BranchResult | BranchStopped:
    """Runs a branch from after `step` to after `end`. The buffers of `state` are deleted.

    Args:
        on_error: saves the state from before the branch if a batch cannot be made.
    """
    started, position = time.perf_counter(), at.batches.state()
    before = at.probe(state, branch.probe_batches)
    start = _Parked(state)
    _delete(state)

    def at_its_start() -> RunState:
        at.batches.restore(position)
        return start.on_devices()

    names = ", ".join(branch.candidates)
    at.log(f"branch at step {step}: trying {names} for {end - step:,} steps each, with a loss of {before:.4f} before")
    losses: dict[str, float] = {}
    best: tuple[str, _Parked, list[TakenStep]] | None = None
    with on_error.between(at_its_start, step):
        for name, controls in branch.candidates.items():
            candidate = at.control.with_candidate(at_its_start(), controls)
            try:
                candidate, taken = _trained(candidate, step, end, at)
            except _Stop as stop:
                return BranchStopped(at_its_start(), stop.signal)
            loss = at.probe(candidate, branch.probe_batches)
            losses[name] = loss if math.isfinite(loss) else math.inf
            at.log(
                f"branch at step {step}: {name} ends with a loss of {loss:.4f}, {len(losses)} of {len(branch.candidates)}"
            )
            if best is None or losses[name] < losses[best[0]]:
                best = name, _Parked(candidate), taken
            _delete(candidate)
    assert best is not None, "a branch has candidates"
    winner, parked, taken = best
    result = Branched(branch.purpose, before, losses, winner, end - step)
    return BranchResult(parked.on_devices(), result, taken, time.perf_counter() - started)


def _trained(state: RunState, step: int, end: int, at: OpenPhase) -> tuple[RunState, list[TakenStep]]:
    """The state after `end`, and the steps. Raises `_Stop` on all processes if one of them is asked to stop."""
    taken: list[TakenStep] = []
    for _ in range(step, end):
        started = time.perf_counter()
        batch = next(at.batches)
        loading_s = time.perf_counter() - started
        state, report = at.train_step(state, batch, at.flag_sync.raised(save=False))
        at.batches.read_ahead()
        taken.append(TakenStep(report, loading_s, dict(at.batches.metrics())))
        if len(taken) >= MAX_IN_FLIGHT:
            _check_stop(taken[-MAX_IN_FLIGHT].report, at)
        at.clock.progress()
    _check_stop(taken[-1].report, at)
    return state, taken


def _check_stop(report: StepReport, at: OpenPhase) -> None:
    """Waits for a step. Raises `_Stop` if a process that took it was asked to stop."""
    if signal := at.flag_sync.agreed(np.asarray(report.flags), save=False).stop:
        raise _Stop(signal)


class _Parked:
    """A copy of a state in the memory of the hosts."""

    def __init__(self, state: RunState):
        self._shardings: Any = jax.tree.map(lambda array: array.sharding, state)
        on_host = lambda array: jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))  # noqa: E731
        self._arrays = jax.block_until_ready(jax.tree.map(on_host, state))

    def on_devices(self) -> RunState:
        """The state on the devices, where it was."""
        return jax.tree.map(jax.device_put, self._arrays, self._shardings)


def _delete(state: RunState) -> None:
    for array in jax.tree.leaves(state):
        array.delete()
