"""Measures in every step what tells whether training goes well: means, spikes and plateaus of loss and gradient norm.

It changes no update. Outliers of a number that changes slowly, such as the loss, are in units of its own noise around its
trend (`Trend`).

What the detectors do was chosen by measurement, on noise around a constant and around a falling loss and on 20,280 steps of
15 runs of small models (1 to 30 million parameters, batches of 8 to 32 rows):

* A spike is an outlier against the trend. On noise around a constant, 0.001 % of the steps are flagged with a `loss_limit` of
  5, and none of the first 100; on the runs, 0.4 of 1,000 steps.
* Gradient norms have long tails: with a limit of 5, 6.8 of 1,000 steps of the runs were flagged, and 2.5 with 8.
* A plateau is a slope that is not significantly below 0 (one-sided t-test at 5 %). A window of 300 steps finds 95 % of those
  with noise of 0.05 and of 0.27 nats, and none where the loss falls by 0.001 a step. On the runs, it flags 2 % of the steps
  where the loss fell by more than 2 % in 200 steps, and 85 % where it fell by less than 1 %. A limit on the slope itself, or
  patience on a running mean, found fewer or flagged more (docs/log.md).

Source: the trend is Brown's double exponential smoothing (Smoothing, Forecasting and Prediction of Discrete Time Series,
1963) as discounted least squares, which is exact from the first value; the scale is the median absolute residual (Huber,
Robust Statistics, 1981, section 5.1). Residuals are winsorized before either learns from them.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from annotated_types import Interval

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.field_types import PositiveFloat, PositiveInt
from jaxlm.core.guards import StepGuard, StepStats, Verdict
from jaxlm.core.rules import Rules, ordered
from jaxlm.core.values import logged
from jaxlm.optim.bad_steps import STD_PER_MAD, RollingWindow, RunningMean

_IN_STACK = ".layers."  # of a parameter's path: what comes before names its stack


def norm(arrays: Any) -> jax.Array:
    """The norm of all arrays of a tree together, float32."""
    squares = (jnp.sum(_squared(tree.raw(leaf))) for _, leaf in tree.leaves(arrays))
    return jnp.sqrt(sum(squares, jnp.zeros(())))


def layer_norms(arrays: Any) -> jax.Array:
    """The norm of each layer, float32 [number of layers], over all stacks of layers.

    Arrays outside of stacks belong to no layer: embeddings, and those with a few numbers for each layer beside its stack.
    """
    squares: dict[str, Any] = defaultdict(float)
    for path, leaf in tree.leaves(arrays):
        stack, _, inside = path.partition(_IN_STACK)
        names = [axis.name for axis in leaf.axes] if tree.is_named(leaf) and inside else []
        if LAYERS in names:
            others = tuple(number for number, name in enumerate(names) if name != LAYERS)
            squares[stack] += jnp.sum(_squared(leaf.array), axis=others)
    return jnp.sqrt(jnp.concatenate([jnp.zeros(0), *squares.values()]))


def layer_ratio(arrays: Any) -> jax.Array:
    """The largest norm of a layer over the median of the layers. 1 without stacks of layers, or if the median is 0."""
    norms = layer_norms(arrays)
    if not norms.size:
        return jnp.ones(())
    median = jnp.median(norms)
    return jnp.where(median > 0, jnp.max(norms) / jnp.where(median > 0, median, 1.0), 1.0)


def _squared(array: jax.Array) -> jax.Array:
    return jnp.square(array.astype(jnp.float32))


_DISCOUNT = 0.95  # of a residual's weight, with each value
_RESTART_AFTER = 10  # outliers in a row


class Judged(NamedTuple):
    """Holds what a trend says about a value.

    Attributes:
        score: float32, the residual in robust standard deviations; 0 before there are enough values, infinity for a value
            that is not finite.
        value: float32, the value that the trend has learned: at most `limit` standard deviations from what was expected.
    """

    score: jax.Array
    value: jax.Array


class Trend(eqx.Module):
    """A line through recent values, of which older ones weigh less, and the size of the residuals.

    After 10 outliers in a row, the line starts over from the newest value: the level has changed for good. So a change of the
    level counts as at most 10 outliers.

    Attributes:
        level: float32, the line at the newest value.
        slope: float32, its change per value.
        moments: float32 [3], sums over the values of their weights, times their age to the power of 0, 1 and 2.
        residuals: their absolute values, winsorized.
        in_a_row: int32, number of outliers since the last value that was none.
    """

    level: jax.Array
    slope: jax.Array
    moments: jax.Array
    residuals: RollingWindow
    in_a_row: jax.Array

    @staticmethod
    def empty(window: int) -> "Trend":
        """The trend of no values. Call it in traced code, so that it is created on the mesh.

        Args:
            window: number of residuals that tell the scale.
        """
        zero = jnp.zeros(())
        # One value has no slope: a weight that vanishes soon says that it is 0.
        moments = jnp.asarray([0.0, 0.0, 1.0])
        return Trend(zero, zero, moments, RollingWindow.empty(window), jnp.zeros((), jnp.int32))

    def push(
        self, value: jax.Array, *, limit: float, min_values: int, smallest_scale: jax.Array | float
    ) -> "tuple[Trend, Judged]":
        """The trend with one more value, and what the trend from before says about it.

        A value that is not finite changes nothing.

        Args:
            limit: scores beyond it, on either side, are outliers.
            min_values: the number of values before the first that can be an outlier.
            smallest_scale: lower bound of the standard deviation.
        """
        finite = jnp.isfinite(value)
        expected = self.level + self.slope
        residual = jnp.where(finite, value - expected, 0.0)
        is_ready = self.residuals.count >= min_values
        median = jnp.where(self.residuals.count > 0, self.residuals.median(), 0.0)
        scale = jnp.maximum(STD_PER_MAD * median, smallest_scale)
        is_outlier = is_ready & (jnp.abs(residual) > limit * scale)
        clipped = jnp.where(is_outlier, jnp.sign(residual) * limit * scale, residual)
        in_a_row = jnp.where(is_outlier, self.in_a_row + 1, 0)
        restarts = in_a_row >= _RESTART_AFTER

        s0, s1, s2 = self.moments
        s0, s1, s2 = 1 + _DISCOUNT * s0, _DISCOUNT * (s1 + s0), _DISCOUNT * (s2 + 2 * s1 + s0)
        determinant = s0 * s2 - s1**2
        learned = Trend(
            jnp.where(restarts, value, expected + s2 / determinant * clipped),
            jnp.where(restarts, 0.0, self.slope + s1 / determinant * clipped),
            jnp.stack([s0, s1, s2]),
            self.residuals.push(jnp.abs(clipped)),
            jnp.where(restarts, 0, in_a_row),
        )
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), learned, self)
        score = jnp.where(finite, jnp.where(is_ready, residual / scale, 0.0), jnp.inf)
        return after, Judged(score, jnp.where(restarts, value, expected + clipped))


def slope(window: RollingWindow) -> tuple[jax.Array, jax.Array]:
    """The slope per value of the least-squares line through the values, and its standard error. Both are 0 for fewer than 3.

    The values are summed anew each time: differences of running sums would lose their digits.
    """
    capacity = window.values.shape[0]
    is_set = jnp.arange(capacity) < window.count
    count = jnp.maximum(window.count, 3).astype(jnp.float32)
    age = (window.place - 1 - jnp.arange(capacity)) % capacity
    x = jnp.where(is_set, (count - 1) / 2 - age, 0.0)
    y = jnp.where(is_set, window.values - window.mean(), 0.0)
    sum_squares = count * (count**2 - 1) / 12
    rise = jnp.sum(x * y) / sum_squares
    variance = jnp.sum(jnp.where(is_set, jnp.square(y - rise * x), 0.0)) / jnp.maximum(count - 2, 1)
    has_slope = window.count >= 3
    return jnp.where(has_slope, rise, 0.0), jnp.where(has_slope, jnp.sqrt(variance / sum_squares), 0.0)


_SIGNIFICANT = 1.645  # standard errors: 5 % of a normal distribution lie above
# Changes below these are no outliers, however quiet the run is: 0.2 % of the loss, and 2 % of the gradient norm.
_MIN_RELATIVE_LOSS_SCALE = 2e-3
_MIN_LOG_NORM_SCALE = 0.02
_TINY = 1e-30  # a gradient norm of 0 has no logarithm

WindowLength = Annotated[int, Interval(ge=20, le=1_000_000)]
"""Steps in a window; fewer than 20 are not enough for an estimate."""


class TelemetryState(eqx.Module):
    """Holds what the telemetry remembers.

    Attributes:
        losses, log_norms: trends of the loss and of the logarithm of the gradient norm.
        norms: recent gradient norms.
        spikes: 1 for each recent step that was a spike, 0 for the others.
        recent: the losses of recent steps, winsorized.
        fast, slow: running means of the loss.
    """

    losses: Trend
    log_norms: Trend
    norms: RollingWindow
    spikes: RollingWindow
    recent: RollingWindow
    fast: RunningMean
    slow: RunningMean


@dataclass(frozen=True)
class Telemetry(StepGuard):
    """Measures the trend of the loss and of the gradient norm, spikes and plateaus, in every step.

    Attributes:
        window: number of recent steps for the noise, the median of the gradient norm, and the number of spikes.
        min_steps: the number of steps before the first that can be a spike.
        loss_limit: a loss this many standard deviations above its trend is a spike.
        grad_norm_limit: a gradient norm whose logarithm is this many standard deviations above its trend is a spike.
        plateau_window: number of recent steps whose loss must not fall for a plateau.
        mean_steps: memory of the running mean of the loss, in steps.
        reference_steps: memory of the slow running mean of the loss, in steps.
    """

    name: ClassVar[str] = logged.TELEMETRY

    window: WindowLength = 128
    min_steps: WindowLength = 20
    loss_limit: PositiveFloat = 5.0
    grad_norm_limit: PositiveFloat = 8.0
    plateau_window: WindowLength = 300
    mean_steps: PositiveInt = 20
    reference_steps: PositiveInt = 200

    key_rules: ClassVar[Rules] = (
        ordered("min_steps", "window"),
        ordered("mean_steps", "reference_steps", strictly=True, why="and a controller compares the two means"),
    )

    def init_slot(self) -> TelemetryState:
        trend, recent = Trend.empty(self.window), RollingWindow.empty(self.window)
        mean = RunningMean.empty()
        return TelemetryState(trend, trend, recent, recent, RollingWindow.empty(self.plateau_window), mean, mean)

    def judge(self, slot: TelemetryState, stats: StepStats) -> Verdict:
        """Measures one step, whether another guard rejects it or not. A value that is not finite enters nothing."""
        smallest = _MIN_RELATIVE_LOSS_SCALE * jnp.abs(slot.losses.level)
        losses, loss = slot.losses.push(
            stats.objective, limit=self.loss_limit, min_values=self.min_steps, smallest_scale=smallest
        )
        log_norms, log_norm = slot.log_norms.push(
            jnp.log(jnp.maximum(stats.norm, _TINY)),
            limit=self.grad_norm_limit,
            min_values=self.min_steps,
            smallest_scale=_MIN_LOG_NORM_SCALE,
        )
        is_spike = ~stats.finite | (loss.score > self.loss_limit) | (log_norm.score > self.grad_norm_limit)
        recent = _pushed(slot.recent, loss.value, jnp.isfinite(stats.objective))
        fall, error = slope(recent)
        after = TelemetryState(
            losses,
            log_norms,
            _pushed(slot.norms, stats.norm, jnp.isfinite(stats.norm)),
            slot.spikes.push(is_spike.astype(jnp.float32)),
            recent,
            slot.fast.push(stats.objective, self.mean_steps),
            slot.slow.push(stats.objective, self.reference_steps),
        )
        metrics = {
            logged.LOSS: after.fast.mean(),
            logged.LOSS_REFERENCE: after.slow.mean(),
            logged.LOSS_SCORE: loss.score,
            logged.GRAD_NORM_SCORE: log_norm.score,
            logged.GRAD_NORM_RATIO: self._norm_ratio(slot.norms, stats.norm),
            logged.IS_SPIKE: is_spike,
            logged.NUM_SPIKES: jnp.sum(after.spikes.values),
            logged.IS_PLATEAU: (recent.count == self.plateau_window) & (fall > -_SIGNIFICANT * error),
            logged.SLOPE: jnp.where(recent.count >= self.min_steps, fall, 0.0),
            logged.LAYER_RATIO: layer_ratio(stats.gradient),
            logged.UPDATE_RATIO: stats.update_norm / jnp.maximum(norm(stats.parameters), _TINY),
        }
        return Verdict(jnp.asarray(True), after, {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()})

    def reason(self, metrics: Mapping[str, float]) -> str | None:
        return None  # it rejects nothing

    def _norm_ratio(self, norms: RollingWindow, value: jax.Array) -> jax.Array:
        is_ready = norms.count >= self.min_steps
        median = jnp.where(is_ready, norms.median(), 1.0)
        ratio = jnp.where(is_ready, value / jnp.maximum(median, _TINY), 1.0)
        return jnp.where(jnp.isfinite(value), ratio, jnp.inf)


def telemetry_guards(setting: "bool | Telemetry | None") -> tuple[Telemetry, ...]:
    """The guards for an `optimizer.telemetry` setting: none, one with defaults, or the given one."""
    if isinstance(setting, Telemetry):
        return (setting,)
    return (Telemetry(),) if setting else ()


def _pushed(window: RollingWindow, value: jax.Array, is_pushed: jax.Array) -> RollingWindow:
    return jax.tree.map(lambda new, old: jnp.where(is_pushed, new, old), window.push(value), window)
