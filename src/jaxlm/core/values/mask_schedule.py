"""How many tokens of a sequence are hidden, by its time in [0, 1].

Source: masking as in StackWise (`num_time_steps`, `time_step_mask_fractions`, ...); continuous times and their weights in the
bound: Sahoo et al. 2024, "Simple and Effective Masked Diffusion Language Models" (arXiv:2406.07524), equation 10, where the
mask fraction is 1 - alpha.
"""

import abc
from dataclasses import dataclass
from typing import Literal

import numpy as np

ScheduleType = Literal["linear", "cosine", "exponential"]

NEARLY_NONE = 0.01
"""The largest fraction to hide at time 0 for a bound. The bound lacks as large a share."""
WITHOUT_BOUND = (
    "num_time_steps, time_step_mask_fractions, mode, random_fraction, unchanged_fraction, min_mask_fraction above"
    f" {NEARLY_NONE}, max_mask_fraction below 1 and a single time in times"
)
"""The keys of `data.masking` that give no bound, for messages."""


class MaskSchedule(abc.ABC):
    """Mask fractions by time."""

    @abc.abstractmethod
    def times(self, uniform: np.ndarray) -> np.ndarray:
        """The times that have these uniform numbers in [0, 1), float64 likewise."""

    @abc.abstractmethod
    def fractions(self, times: np.ndarray) -> np.ndarray:
        """The fraction of tokens to hide at some times, float64 likewise."""

    @abc.abstractmethod
    def rates(self, times: np.ndarray) -> np.ndarray | None:
        """The derivative of the logarithm of the fraction by the time, float64; None for times that are steps."""


@dataclass(frozen=True)
class ContinuousSchedule(MaskSchedule):
    """A fraction that grows from `low` to `high`.

    Attributes:
        kind: `linear` in the time; `cosine`: by 1 - cos(pi t / 2); `exponential`: by the same factor in equal times.
    """

    kind: ScheduleType
    low: float
    high: float

    def times(self, uniform: np.ndarray) -> np.ndarray:
        return uniform

    def fractions(self, times: np.ndarray) -> np.ndarray:
        if self.kind == "exponential":
            return self.low * (self.high / self.low) ** times
        share = times if self.kind == "linear" else 1 - np.cos(np.pi / 2 * times)
        return self.low + (self.high - self.low) * share

    def rates(self, times: np.ndarray) -> np.ndarray:
        if self.kind == "exponential":
            return np.full_like(times, np.log(self.high / self.low))
        slope = 1.0 if self.kind == "linear" else np.pi / 2 * np.sin(np.pi / 2 * times)
        return (self.high - self.low) * slope / self.fractions(times)


@dataclass(frozen=True)
class SteppedSchedule(MaskSchedule):
    """A few fractions, each at a time of its own: step k of n is at k / (n - 1); a single step at 1."""

    by_step: tuple[float, ...]

    @staticmethod
    def of(schedule: ContinuousSchedule, num_steps: int) -> "SteppedSchedule":
        """The fractions of a continuous schedule at steps at equal distances."""
        times = np.linspace(0, 1, num_steps) if num_steps > 1 else np.ones(1)
        return SteppedSchedule(tuple(schedule.fractions(times).tolist()))

    def times(self, uniform: np.ndarray) -> np.ndarray:
        steps = np.floor(uniform * len(self.by_step))
        return steps / (len(self.by_step) - 1) if len(self.by_step) > 1 else np.ones_like(uniform)

    def fractions(self, times: np.ndarray) -> np.ndarray:
        return np.asarray(self.by_step)[np.rint(times * (len(self.by_step) - 1)).astype(int)]

    def rates(self, times: np.ndarray) -> None:
        return None
