"""What the steps report, fetched without making the devices wait."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxlm.core.batch_schedule import BatchSchedule
from jaxlm.core.types import Histogram, StepInfo
from jaxlm.engine.step import Report
from jaxlm.engine.watch import WatchConfig, arrived

# Beyond a handful nothing gets faster, and on CPU meshes jax deadlocks when dozens of steps with collectives are queued.
MAX_IN_FLIGHT = 4

Listener = Callable[[StepInfo], None]


@dataclass(frozen=True)
class Totals:
    """What a run had done when this process took it up.

    Attributes:
        step: steps done.
        tokens: trained on, padding included.
        gflops: 1e9 operations of the model.
    """

    step: int = 0
    tokens: float = 0.0
    gflops: float = 0.0


@dataclass(frozen=True)
class Workload:
    """What the steps amount to, and how many there are.

    Attributes:
        batches: sequences of each step, over all devices.
        tokens: of a sequence.
        flops: of a sequence (attention counted causally).
        peak_flops: a second, of all devices together; None where it is not known.
        num_steps: of the whole run.
        before: what earlier processes of this run have done, perhaps with another batch size.
    """

    batches: BatchSchedule
    tokens: int
    flops: float
    peak_flops: float | None
    num_steps: int
    before: Totals = Totals()

    def progress(self, step: int) -> dict[str, float]:
        """How far the run is after `step` steps of it."""
        examples = self.batches.examples_between(self.before.step, step)
        return {
            "global_step": step,
            "run_progress": step / self.num_steps,
            "throughput/total_tokens": self.before.tokens + examples * self.tokens,
            "throughput/total_gflops": self.before.gflops + examples * self.flops / 1e9,
        }

    def throughput(self, step: int, seconds: float) -> dict[str, float]:
        """The rates of a step, counted from 1, that took so long."""
        rate = self.batches.at(step - 1).size / seconds
        numbers = {
            "throughput/duration": seconds,
            "throughput/examples_per_second": rate,
            "throughput/tokens_per_second": rate * self.tokens,
            "throughput/gflops_per_second": rate * self.flops / 1e9,
        }
        if self.peak_flops is not None:
            numbers["throughput/mfu"] = rate * self.flops / self.peak_flops
        return numbers


@dataclass
class _PendingStep:
    """A step that was dispatched.

    Attributes:
        loading_s: seconds that the host waited for its batch.
        seconds: that it took, once that is known.
    """

    step: int
    report: Report
    loading_s: float
    seconds: float | None = None

    @property
    def is_done(self) -> bool:
        """Whether its report could be had without waiting."""
        return self.report.flags.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


class AsyncMetrics:
    """The steps in pending, oldest first.

    Attributes:
        flags: the reduced flags of the newest step that was fetched; None before the first.
    """

    def __init__(
        self,
        phase: str,
        workload: Workload,
        listeners: Sequence[Listener],
        watch: WatchConfig | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Args:
        watch: what the steps were compiled to look at.
        clock: seconds.
        """
        self.flags: np.ndarray | None = None
        self._phase = phase
        self._workload = workload
        self._listeners = listeners
        self._watch = watch
        self._clock = clock
        self._pending: deque[_PendingStep] = deque()
        self._last_arrival = clock()
        self._hooks_s = 0.0

    def push(self, step: int, report: Report, loading_s: float) -> None:
        """Adds a step that was just dispatched; waits for the oldest one where too many are in pending.

        Args:
            loading_s: seconds that the host waited for the step's batch.
        """
        for array in jax.tree.leaves(report):
            array.copy_to_host_async()
        self._pending.append(_PendingStep(step, report, loading_s))
        while len(self._pending) >= MAX_IN_FLIGHT:
            self._fetch()

    def drain(self) -> None:
        """Waits for every step in pending."""
        while self._pending:
            self._fetch()

    def skip_time(self) -> None:
        """Leaves out of the next step's duration what happened since the last one landed (an evaluation, a save).

        The next step reports it as `throughput/hook_time`.
        """
        now = self._clock()
        self._hooks_s = now - self._last_arrival
        self._last_arrival = now

    def _fetch(self) -> None:
        pending = self._pending.popleft()
        seconds = self._arrived(pending) if pending.seconds is None else pending.seconds
        step, report = pending.step, pending.report
        metrics = {name: float(value) for name, value in jax.device_get(report.metrics).items()}
        histograms: dict[str, Histogram] = {}
        if self._watch is not None and self._watch.due(step):
            scalars, histograms = arrived(jax.device_get(report.watched))
            metrics |= scalars
        self.flags = np.asarray(report.flags)
        metrics |= self._workload.progress(step) | self._workload.throughput(step, seconds)
        metrics |= {"throughput/loading_time": pending.loading_s, "throughput/hook_time": self._hooks_s}
        self._hooks_s = 0.0
        for listener in self._listeners:
            listener(StepInfo(step, self._phase, metrics, histograms))

    def _arrived(self, pending: _PendingStep) -> float:
        """Waits for a step, and tells how long it took.

        Steps that are found done together share the time since the one before them: when each of them was done, nobody saw.
        """
        jax.block_until_ready(pending.report)
        now = self._clock()
        together = [pending, *itertools.takewhile(lambda other: other.is_done, self._pending)]
        seconds = (now - self._last_arrival) / len(together)
        for one in together:
            one.seconds = seconds
        self._last_arrival = now
        return seconds


class NonFiniteError(Exception):
    """A step's loss or gradient is not finite, and the configuration says to stop there."""


class CrashListener:
    """Stops the run at the first number that it must not go on from. It hears of a step when its report has arrived."""

    def __init__(self, *, on_nan: bool, on_inf: bool):
        self._on_nan = on_nan
        self._on_inf = on_inf

    def __call__(self, info: StepInfo) -> None:
        for name in ("train/objective", "grad/norm/total"):
            value = info.metrics[name]
            if (self._on_nan and math.isnan(value)) or (self._on_inf and math.isinf(value)):
                raise NonFiniteError(
                    f"step {info.step}: {name} is {value} (trainer.crash_on_{'nan' if math.isnan(value) else 'inf'})."
                    " The update was left out; the newest checkpoint is from before"
                )
