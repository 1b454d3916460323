"""Skips steps whose loss or gradient norm is an outlier compared with recent steps.

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

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveFloat, PositiveInt
from jaxlm.core.guards import GRADIENT_NORM, OBJECTIVE, RewindRule, StepGuard, StepStats, Verdict, is_finite
from jaxlm.optim.rolling import RollingWindow

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

    def __post_init__(self):
        if self.rewind_after is not None and self.rewind_after > self.max_in_a_row:
            raise ConfigError(
                f"optimizer.skip_bad_steps.rewind_after: {self.rewind_after} given, null or 1 to {self.max_in_a_row}"
                " expected: after max_in_a_row skipped steps the next outlier is applied. Lower it, or raise max_in_a_row"
            )

    @property
    def rewind_rule(self) -> RewindRule | None:
        """When the run goes back; None if it never does."""
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
        if setting.rewind_after is None and setting.max_rewinds != SkipBadSteps.max_rewinds:
            raise ConfigError(
                f"optimizer.skip_bad_steps.max_rewinds: {setting.max_rewinds} given, which has no effect without"
                " rewind_after. Set rewind_after, or remove max_rewinds"
            )
        return (setting,)
    if isinstance(setting, bool):
        return (SkipBadSteps(),) if setting else ()
    return (SkipBadSteps(setting),)
