"""Leaving out steps whose loss or gradient norm stands far out from the last ones.

Source: the median and the median distance from it as what outliers do not move, Huber 1981, Robust Statistics, section
5.1. Two ways such a guard can go wrong are closed: what was left out never enters the window, so that a bad batch cannot
make the next one look good; and after so many steps in a row the window is what is wrong, and is begun anew.
"""

from dataclasses import dataclass
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core.errors import ConfigError
from jaxlm.core.guards import StepGuard, StepStats, Verdict
from jaxlm.optim.rolling import RollingWindow

# A window of nearly equal values would make an outlier of the next small change.
_SMALLEST_SPREAD = 0.02


class BadStepState(eqx.Module):
    """What is remembered of the last steps.

    Attributes:
        losses, norms: of the steps whose update was applied.
        in_a_row: int32, steps left out since the last one that was applied.
    """

    losses: RollingWindow
    norms: RollingWindow
    in_a_row: jax.Array


@dataclass(frozen=True)
class SkipBadSteps(StepGuard):
    """Leaves out a step whose loss or gradient norm is an outlier.

    Attributes:
        rolling_interval_length: steps to compare with; nothing is left out before half as many.
        sigma_factor: how many standard deviations (robustly estimated) above the median an outlier lies.
        max_in_a_row: after so many steps left out one after the other, the next is taken and the comparison begins anew.
    """

    name: ClassVar[str] = "bad_steps"

    rolling_interval_length: int = 128
    sigma_factor: float = 6.0
    max_in_a_row: int = 8

    def __post_init__(self):
        if self.rolling_interval_length < 8:
            raise ConfigError(
                f"optimizer.skip_bad_steps: a window of {self.rolling_interval_length} steps given, 8 and more expected:"
                " fewer do not tell what is usual. `true` takes 128"
            )
        if not self.sigma_factor > 0 or self.max_in_a_row < 1:
            raise ConfigError(
                f"optimizer.skip_bad_steps: sigma_factor {self.sigma_factor}, max_in_a_row {self.max_in_a_row} given;"
                " more than 0, and 1 and more, expected"
            )

    def init_slot(self) -> BadStepState:
        empty = RollingWindow.empty(self.rolling_interval_length)
        return BadStepState(empty, empty, jnp.zeros((), jnp.int32))

    def judge(self, slot: BadStepState, stats: StepStats) -> Verdict:
        """A step that is not finite leaves no trace here."""
        ready = slot.losses.count >= self.rolling_interval_length // 2
        loss_limit, norm_limit = (jnp.where(ready, self._limit(w), jnp.inf) for w in (slot.losses, slot.norms))
        outlier = stats.finite & ((stats.objective > loss_limit) | (stats.norm > norm_limit))
        anew = outlier & (slot.in_a_row >= self.max_in_a_row)
        left_out = outlier & ~anew
        applied = stats.finite & ~left_out

        def next_window(window: RollingWindow, value: jax.Array) -> RollingWindow:
            begun = jax.tree.map(lambda x: jnp.where(anew, jnp.zeros_like(x), x), window)
            return jax.tree.map(lambda new, old: jnp.where(applied, new, old), begun.with_(value), window)

        in_a_row = jnp.where(left_out, slot.in_a_row + 1, jnp.where(applied, 0, slot.in_a_row))
        after = BadStepState(next_window(slot.losses, stats.objective), next_window(slot.norms, stats.norm), in_a_row)
        metrics = {"loss_limit": loss_limit, "grad_norm_limit": norm_limit, "in_a_row": in_a_row}
        return Verdict(~left_out, after, {f"{self.name}/{name}": value for name, value in metrics.items()})

    def _limit(self, window: RollingWindow) -> jax.Array:
        median = window.median()
        return median + self.sigma_factor * jnp.maximum(window.spread(), _SMALLEST_SPREAD * jnp.abs(median))


def bad_steps(given: bool | int | SkipBadSteps) -> tuple[SkipBadSteps, ...]:
    """What `skip_bad_steps` stands for: nothing, the defaults, a window of so many steps, or itself."""
    if isinstance(given, SkipBadSteps):
        return (given,)
    if isinstance(given, bool):
        return (SkipBadSteps(),) if given else ()
    return (SkipBadSteps(given),)
