"""What the steps report, fetched without making the devices wait."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxlm.core.types import StepInfo
from jaxlm.engine.step import Report

# Beyond a handful nothing gets faster, and on CPU meshes jax deadlocks when dozens of steps with collectives are queued.
MAX_IN_FLIGHT = 4

Listener = Callable[[StepInfo], None]


@dataclass(frozen=True)
class Workload:
    """What one step amounts to.

    Attributes:
        tokens: a step, over all devices.
        flops: of one step, over all devices (attention counted causally).
        peak_flops: a second, of all devices together; None where it is not known.
    """

    tokens: int
    flops: float
    peak_flops: float | None

    def throughput(self, seconds: float) -> dict[str, float]:
        """The `throughput/*` numbers of a step that took so long."""
        numbers = {"throughput/duration": seconds, "throughput/tokens_per_second": self.tokens / seconds}
        if self.peak_flops is not None:
            numbers["throughput/mfu"] = self.flops / seconds / self.peak_flops
        return numbers


class Reports:
    """The steps in flight, oldest first.

    Attributes:
        tally: the processes' common decision in the newest report that was fetched.
    """

    def __init__(self, phase: str, workload: Workload, listeners: Sequence[Listener]):
        self.tally: np.ndarray | None = None
        self._phase = phase
        self._workload = workload
        self._listeners = listeners
        self._flying: deque[tuple[int, Report, float]] = deque()
        self._last_arrival = time.perf_counter()

    def push(self, step: int, report: Report, loading_s: float) -> None:
        """Adds a step that was just dispatched; waits for the oldest one where too many are in flight.

        Args:
            loading_s: seconds that the host waited for the step's batch.
        """
        for array in jax.tree.leaves(report):
            array.copy_to_host_async()
        self._flying.append((step, report, loading_s))
        while len(self._flying) >= MAX_IN_FLIGHT:
            self._land()

    def drain(self) -> None:
        """Waits for every step in flight."""
        while self._flying:
            self._land()

    def skip_time(self) -> None:
        """Leaves out of the next step's duration what happened since the last one landed (an evaluation, a save)."""
        self._last_arrival = time.perf_counter()

    def _land(self) -> None:
        step, report, loading_s = self._flying.popleft()
        metrics = {name: float(value) for name, value in jax.device_get(report.metrics).items()}
        self.tally = np.asarray(report.tally)
        now = time.perf_counter()
        metrics |= self._workload.throughput(now - self._last_arrival) | {"throughput/loading_time": loading_s}
        self._last_arrival = now
        for listener in self._listeners:
            listener(StepInfo(step, self._phase, metrics))
