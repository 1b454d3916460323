"""Fetches the reports of training steps without making the devices wait."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
import numpy as np

from jaxlm.core.guards import GRADIENT_NORM, OBJECTIVE, UPDATE_NORM
from jaxlm.core.values.logged import (
    DURATION,
    EXAMPLES_PER_SECOND,
    GFLOPS_PER_SECOND,
    GLOBAL_STEP,
    HOOK_TIME,
    LOADING_TIME,
    MFU,
    PROGRESS,
    TOKENS_PER_SECOND,
    TOTAL_GFLOPS,
    TOTAL_TOKENS,
    Histogram,
    StepInfo,
)
from jaxlm.data.batch_schedule import BatchSchedule
from jaxlm.engine.step import StepReport
from jaxlm.engine.sync import Rewind
from jaxlm.engine.watch import WatchConfig, split_watched

# More gains nothing, and on CPU meshes JAX deadlocks if dozens of steps with collectives are queued.
MAX_IN_FLIGHT = 4

Listener = Callable[[StepInfo], None]
Decide = Callable[[int, Mapping[str, float], bool], Rewind | None]
"""Gets a step, what the devices measured in it, and whether that is all that they ever measure. Returns how the run goes
back, if it does."""


@dataclass(frozen=True)
class Totals:
    """Totals of a run at some step.

    Attributes:
        step: steps done.
        tokens: tokens trained on, including padding.
        gflops: model FLOPs, in units of 1e9.
    """

    step: int = 0
    tokens: float = 0.0
    gflops: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Holds what is needed to compute progress and throughput.

    Attributes:
        batches: global batch size of each step.
        tokens: tokens per sequence.
        flops: FLOPs per sequence (attention counted causally).
        peak_flops: peak FLOP/s of all devices together; None if unknown.
        num_steps: number of steps of the whole run.
        previous: totals of earlier processes and phases of this run, which may have had other batches.
    """

    batches: BatchSchedule
    tokens: int
    flops: float
    peak_flops: float | None
    num_steps: int
    previous: Totals = Totals()

    def progress(self, step: int) -> dict[str, float]:
        """Metrics for how far the run is after `step` steps."""
        totals = self.totals(step)
        return {
            GLOBAL_STEP: step,
            PROGRESS: step / self.num_steps,
            TOTAL_TOKENS: totals.tokens,
            TOTAL_GFLOPS: totals.gflops,
        }

    def totals(self, step: int) -> Totals:
        """Totals of the run after `step` steps."""
        examples = self.batches.examples_between(self.previous.step, step)
        tokens, gflops = self.previous.tokens, self.previous.gflops
        return Totals(step, tokens + examples * self.tokens, gflops + examples * self.flops / 1e9)

    def throughput(self, step: int, seconds: float) -> dict[str, float]:
        """Throughput metrics of a step (counted from 1) that took `seconds`."""
        rate = self.batches.at(step - 1).size / seconds
        numbers = {
            DURATION: seconds,
            EXAMPLES_PER_SECOND: rate,
            TOKENS_PER_SECOND: rate * self.tokens,
            GFLOPS_PER_SECOND: rate * self.flops / 1e9,
        }
        if self.peak_flops is not None:
            numbers[MFU] = rate * self.flops / self.peak_flops
        return numbers


@dataclass
class _PendingStep:
    """A step that was dispatched but not fetched.

    Attributes:
        loading_s: seconds that the host waited for its batch.
        of_batch: metrics that the host knows of its batch.
        seconds: its duration; None until it is known.
    """

    step: int
    report: StepReport
    loading_s: float
    of_batch: Mapping[str, float]
    seconds: float | None = None

    def is_done(self) -> bool:
        return self.report.flags.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


class AsyncMetrics:
    """A queue of dispatched steps. Fetches their metrics in order and passes them to listeners.

    Attributes:
        flags: reduced flags of the newest fetched step; None before the first.
        rewind: how the run goes back after the newest fetched step; None if it does not. No more steps are fetched then.
    """

    def __init__(
        self,
        phase: str,
        workload: Workload,
        listeners: Sequence[Listener],
        watch: WatchConfig | None = None,
        decide: Decide | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Args:
        watch: what the steps were compiled to measure.
        decide: called after each step.
        clock: returns a time in seconds.
        """
        self.flags: np.ndarray | None = None
        self.rewind: Rewind | None = None
        self._decide = decide
        self._phase = phase
        self._workload = workload
        self._listeners = listeners
        self._watch = watch
        self._clock = clock
        self._pending: deque[_PendingStep] = deque()
        self._last_done = clock()
        self._hooks_s = 0.0

    def push(
        self,
        step: int,
        report: StepReport,
        loading_s: float,
        of_batch: Mapping[str, float] = MappingProxyType({}),
        *,
        seconds: float | None = None,
    ) -> None:
        """Adds a step that was just dispatched. Blocks if too many are pending.

        Args:
            loading_s: how long the host waited for its batch.
            of_batch: metrics that the host knows of its batch.
            seconds: its duration, if it is done already; None measures it.
        """
        if seconds is not None:
            self._last_done = self._clock()
        for array in jax.tree.leaves(report):
            array.copy_to_host_async()
        self._pending.append(_PendingStep(step, report, loading_s, of_batch, seconds))
        while len(self._pending) >= MAX_IN_FLIGHT:
            self._fetch()

    def drain(self) -> Rewind | None:
        """Fetches all pending steps. Returns `rewind`."""
        while self._pending:
            self._fetch()
        return self.rewind

    def skip_time(self) -> None:
        """Excludes the time since the last step (an evaluation, a save) from the next step's duration.

        The next step reports it as `throughput/hook_time`.
        """
        now = self._clock()
        self._hooks_s = now - self._last_done
        self._last_done = now

    def _fetch(self) -> None:
        pending = self._pending.popleft()
        seconds = self._wait_for(pending) if pending.seconds is None else pending.seconds
        step, report = pending.step, pending.report
        metrics = {name: float(value) for name, value in jax.device_get(report.metrics).items()}
        histograms: dict[str, Histogram] = {}
        is_whole = self._watch is None or self._watch.due(step)
        if self._watch is not None and is_whole:
            scalars, histograms = split_watched(jax.device_get(report.watched))
            metrics |= scalars
        self.flags = np.asarray(report.flags)
        measured = metrics
        metrics = measured | self._workload.progress(step) | self._workload.throughput(step, seconds)
        metrics |= {LOADING_TIME: pending.loading_s, HOOK_TIME: self._hooks_s, **pending.of_batch}
        self._hooks_s = 0.0
        info = StepInfo(step, self._phase, metrics, histograms)
        for listener in self._listeners:
            listener(info)
        if self._decide is not None and (rewind := self._decide(step, measured, is_whole)) is not None:
            self.rewind = rewind
            self._pending.clear()

    def _wait_for(self, pending: _PendingStep) -> float:
        """Blocks until a step is done and returns its duration.

        Later steps that are done by then share the elapsed time equally, because it is unknown when each one finished.
        """
        jax.block_until_ready(pending.report)
        now = self._clock()
        done = [pending, *itertools.takewhile(_PendingStep.is_done, self._pending)]
        seconds = (now - self._last_done) / len(done)
        for step in done:
            step.seconds = seconds
        self._last_done = now
        return seconds


class NonFiniteError(Exception):
    """A step's loss, gradient norm or update norm is not finite, and the configuration says to stop."""


class CrashListener:
    """Raises `NonFiniteError` for NaN or infinity. Later steps may already be dispatched when a step's report is fetched."""

    def __init__(self, *, on_nan: bool, on_inf: bool):
        self._on_nan = on_nan
        self._on_inf = on_inf

    def __call__(self, info: StepInfo) -> None:
        for name in (OBJECTIVE, GRADIENT_NORM, UPDATE_NORM):
            value = info.metrics[name]
            if (self._on_nan and math.isnan(value)) or (self._on_inf and math.isinf(value)):
                raise NonFiniteError(
                    f"step {info.step}: {name} is {value} (trainer.crash_on_{'nan' if math.isnan(value) else 'inf'})."
                    " The update was skipped, and the newest checkpoint is from before this step"
                )
