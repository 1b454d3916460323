"""Skips steps whose loss or gradient norm is an outlier compared with recent ones, of which a window is kept.

Source: the median and the median absolute deviation as robust estimates, Huber 1981, Robust Statistics, section 5.1. Two
failure modes are prevented. Skipped steps never enter the window, so a bad batch cannot make the next one look normal.
After several skipped steps in a row the window itself is assumed to be outdated and is reset.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from annotated_types import Interval

from jaxlm.core.field_types import PositiveFloat, PositiveInt
from jaxlm.core.guards import GRADIENT_NORM, OBJECTIVE, RewindRule, StepGuard, StepStats, Verdict, is_finite
from jaxlm.core.rules import Rules, only, ordered

STD_PER_MAD = 1.4826  # standard deviation of a normal distribution divided by its median absolute deviation


class RollingWindow(eqx.Module):
    """A ring buffer of float32 values.

    Attributes:
        values: [capacity]; the first `count` entries are set. Their order does not matter.
        count: int32, number of values stored.
        place: int32, index at which to write the next value.
    """

    values: jax.Array
    count: jax.Array
    place: jax.Array

    @staticmethod
    def empty(capacity: int) -> "RollingWindow":
        """An empty window. Call it in traced code, so that the window is created on the mesh."""
        return RollingWindow(jnp.zeros(capacity, jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def push(self, value: jax.Array) -> "RollingWindow":
        """Returns a window with one more value. In a full window it replaces the oldest."""
        capacity = self.values.shape[0]
        return RollingWindow(
            self.values.at[self.place].set(value.astype(jnp.float32)),
            jnp.minimum(self.count + 1, capacity),
            (self.place + 1) % capacity,
        )

    def mean(self) -> jax.Array:
        """Mean of the values; 0 if the window is empty."""
        return jnp.sum(self._or_zero(self.values)) / jnp.maximum(self.count, 1)

    def std(self) -> jax.Array:
        """Population standard deviation of the values; 0 if the window is empty."""
        return jnp.sqrt(jnp.sum(self._or_zero(jnp.square(self.values - self.mean()))) / jnp.maximum(self.count, 1))

    def median(self) -> jax.Array:
        """Median of the values; NaN if the window is empty."""
        return self._median(self.values)

    def robust_std(self) -> jax.Array:
        """Standard deviation estimated from the median absolute deviation, which a few outliers do not affect."""
        return STD_PER_MAD * self._median(jnp.abs(self.values - self.median()))

    def _median(self, values: jax.Array) -> jax.Array:
        return jnp.nanmedian(jnp.where(self._is_set(), values, jnp.nan))

    def _or_zero(self, values: jax.Array) -> jax.Array:
        return jnp.where(self._is_set(), values, 0.0)

    def _is_set(self) -> jax.Array:
        return jnp.arange(self.values.shape[0]) < self.count


class RunningMean(eqx.Module):
    """An exponential moving average, divided by the sum of its weights as in Adam: after one value, it is that value.

    Attributes:
        total: float32, the weighted sum of the values.
        weight: float32, the sum of their weights; approaches 1.
    """

    total: jax.Array
    weight: jax.Array

    @staticmethod
    def empty() -> "RunningMean":
        """The mean of no values. Call it in traced code, so that it is created on the mesh."""
        return RunningMean(jnp.zeros(()), jnp.zeros(()))

    def push(self, value: jax.Array, num_steps: int) -> "RunningMean":
        """Returns the mean with one more value, with a weight of `1 / num_steps`. What is not finite changes nothing."""
        rate = 1 / num_steps
        pushed = RunningMean(self.total + rate * (value - self.total), self.weight + rate * (1 - self.weight))
        return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(value), new, old), pushed, self)

    def mean(self) -> jax.Array:
        """The mean; 0 without values."""
        return self.total / jnp.where(self.weight > 0, self.weight, 1.0)


# Relative to the median. In a window of nearly equal values any small change would be an outlier.
_MIN_RELATIVE_STD = 0.02
WindowLength = Annotated[int, Interval(ge=8, le=1_000_000)]
"""Steps in a window; fewer than 8 are not enough for an estimate."""
# What may be an outlier, and the metrics with its value and its limit.
_LIMITS = (
    ("loss", OBJECTIVE, "bad_steps/loss_limit"),
    ("gradient norm", GRADIENT_NORM, "bad_steps/grad_norm_limit"),
)


class BadStepState(eqx.Module):
    """Recent loss and gradient-norm values.

    Attributes:
        losses, norms: values of recent steps whose update was applied.
        in_a_row: int32, number of steps skipped since the last applied one.
    """

    losses: RollingWindow
    norms: RollingWindow
    in_a_row: jax.Array


@dataclass(frozen=True)
class SkipBadSteps(StepGuard):
    """Skips a step if its loss or gradient norm is an outlier.

    Attributes:
        rolling_interval_length: number of recent steps to compare with. No step is skipped before half of them have run.
        sigma_factor: a step is an outlier if it is this many (robustly estimated) standard deviations above the median.
        max_in_a_row: maximum number of consecutive skipped steps. After that, the next step is applied and the comparison
            window is reset.
        rewind_after: number of updates skipped in a row, as outliers or because they are not finite, after which the run
            goes back to the newest checkpoint from before them and continues with the data after them. Null never goes
            back.
        max_rewinds: how often a run goes back before it stops with an error instead.
    """

    name: ClassVar[str] = "bad_steps"

    rolling_interval_length: WindowLength = 128
    sigma_factor: PositiveFloat = 6.0
    max_in_a_row: PositiveInt = 8
    rewind_after: PositiveInt | None = None
    max_rewinds: Annotated[int, Interval(ge=1, le=1000)] = 3

    key_rules: ClassVar[Rules] = (
        ordered("rewind_after", "max_in_a_row", why="after which an outlier is applied, not skipped"),
        only("max_rewinds", when="rewind_after"),
    )

    @property
    def rewind_rule(self) -> RewindRule | None:
        """The rule by which the run goes back; None if it never does."""
        return None if self.rewind_after is None else RewindRule(self.rewind_after, self.max_rewinds)

    def init_slot(self) -> BadStepState:
        empty = RollingWindow.empty(self.rolling_interval_length)
        return BadStepState(empty, empty, jnp.zeros((), jnp.int32))

    def judge(self, slot: BadStepState, stats: StepStats) -> Verdict:
        """Judges one step. A non-finite step does not change the state."""
        ready = slot.losses.count >= self.rolling_interval_length // 2
        loss_limit, norm_limit = (jnp.where(ready, self._limit(w), jnp.inf) for w in (slot.losses, slot.norms))
        high_loss, high_norm = stats.objective > loss_limit, stats.norm > norm_limit
        outlier = stats.finite & (high_loss | high_norm)
        reset = outlier & (slot.in_a_row >= self.max_in_a_row)
        skipped = outlier & ~reset
        applied = stats.finite & ~skipped

        def next_window(window: RollingWindow, value: jax.Array) -> RollingWindow:
            start = jax.tree.map(lambda x: jnp.where(reset, jnp.zeros_like(x), x), window)
            return jax.tree.map(lambda new, old: jnp.where(applied, new, old), start.push(value), window)

        in_a_row = jnp.where(skipped, slot.in_a_row + 1, jnp.where(applied, 0, slot.in_a_row))
        after = BadStepState(next_window(slot.losses, stats.objective), next_window(slot.norms, stats.norm), in_a_row)
        metrics = {"loss_limit": loss_limit, "grad_norm_limit": norm_limit, "in_a_row": in_a_row}
        return Verdict(~skipped, after, {f"{self.name}/{name}": value for name, value in metrics.items()})

    def reason(self, metrics: Mapping[str, float]) -> str | None:
        if not is_finite(metrics):
            return None  # not an outlier
        texts = [
            f"{name} {metrics[value]:.4g} (limit {metrics[limit]:.4g})"
            for name, value, limit in _LIMITS
            if metrics[value] > metrics[limit]
        ]
        return f"{' and '.join(texts)} {'are outliers' if len(texts) > 1 else 'is an outlier'}" if texts else None

    def _limit(self, window: RollingWindow) -> jax.Array:
        median = window.median()
        return median + self.sigma_factor * jnp.maximum(window.robust_std(), _MIN_RELATIVE_STD * jnp.abs(median))


def bad_step_guards(setting: bool | WindowLength | SkipBadSteps) -> tuple[SkipBadSteps, ...]:
    """The guards for a `skip_bad_steps` setting: none, one with defaults, one with a window length, or the given one."""
    if isinstance(setting, SkipBadSteps):
        return (setting,)
    if isinstance(setting, bool):
        return (SkipBadSteps(),) if setting else ()
    return (SkipBadSteps(setting),)
