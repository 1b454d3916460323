"""What a run reports about all of its steps so far: the smoothed training loss, the training time, the best bits per byte.

A run that resumes, or goes back, continues them from its records.
"""

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxlm.core.values.logged import BEST_BPB, DURATION, EVAL_BPB, SMOOTHED_LOSS, TRAIN_LOSS, TRAINING_TIME

if TYPE_CHECKING:
    from jaxlm.core.values.logged import StepInfo

_DECAY = 0.9


class LoopState:
    """Follows a run's metrics."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = (), step: int = 0):
        """Args:
        records: of the run so far.
        step: the step that the run goes on from. The records of later steps, which it went back over, are ignored.
        """
        self._losses, self._seconds, self._bits = _Values(), _Values(), _Values()
        for record in records:
            if record["step"] <= step:
                self._add(record["step"], record)
        self._sum()

    def __call__(self, info: "StepInfo") -> None:
        self._add(info.step, info.metrics)
        self._follow(info.metrics.get(TRAIN_LOSS, math.nan))
        self._training_time_s += info.metrics.get(DURATION, 0.0)

    def metrics(self) -> dict[str, float]:
        """The smoothed loss, if there was one, and the training time."""
        smoothed = {SMOOTHED_LOSS: self._mean / (1 - self._rest)} if self._rest < 1 else {}
        return {**smoothed, TRAINING_TIME: self._training_time_s}

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The best bits per byte so far. Args: metrics: of an evaluation."""
        if EVAL_BPB not in metrics:
            return {}
        self._bits.add(step, metrics[EVAL_BPB])
        finite = [bits for bits in self._bits.values if math.isfinite(bits)]
        return {BEST_BPB: min(finite)} if finite else {}

    def go_back(self, step: int) -> None:
        """Forgets what comes after `step`."""
        for values in (self._losses, self._seconds, self._bits):
            values.cut(step)
        self._sum()

    def _add(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, values in ((TRAIN_LOSS, self._losses), (DURATION, self._seconds), (EVAL_BPB, self._bits)):
            if metrics.get(name) is not None:
                values.add(step, metrics[name])

    def _sum(self) -> None:
        self._mean, self._rest, self._training_time_s = 0.0, 1.0, 0.0
        for loss in self._losses.values:
            self._follow(loss)
        for seconds in self._seconds.values:
            self._training_time_s += seconds

    def _follow(self, loss: float) -> None:
        """Adds a loss to the moving average. `_rest` is the weight of the zero that it began with."""
        if math.isfinite(loss):
            self._mean = _DECAY * self._mean + (1 - _DECAY) * loss
            self._rest *= _DECAY


class _Values:
    """Numbers by step, 16 bytes each."""

    def __init__(self):
        self._steps, self.values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        self._steps.append(step)
        self.values.append(value)

    def cut(self, step: int) -> None:
        while self._steps and self._steps[-1] > step:
            self._steps.pop()
            self.values.pop()
