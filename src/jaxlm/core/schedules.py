"""Learning rate by step: [warmup] -> [stable] -> [decay].

A schedule is a list of segments, each a formula on its own stretch of steps; looking a step up works the same for a
Python integer and for a traced one. Source of the warmup-stable-decay form: Hu et al. 2024, MiniCPM (arXiv:2404.06395),
section 4; of the cosine: Loshchilov and Hutter 2017 (arXiv:1608.03983), equation 5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxlm.core.errors import ConfigError

# Inverse square root decays from its peak only after so many steps (Vaswani et al. 2017 use the warmup for it).
_INV_SQRT_TIMESCALE = 10_000


@dataclass(frozen=True)
class Shape:
    """What a schedule looks like, in numbers.

    Attributes:
        peak: the highest value.
        warmup: steps, or fraction of the run, from 0 up to the peak.
        decay: steps, or fraction of the run, from the peak down; None decays over all that warmup leaves.
        kind: constant, linear, cosine, inv_sqrt or inv.
        min_ratio: the last value as a fraction of the peak.
    """

    peak: float
    warmup: int | float
    decay: int | float | None
    kind: str
    min_ratio: float


@dataclass(frozen=True)
class Segment:
    """One stretch of a schedule.

    Attributes:
        name: warmup, stable or decay.
        start: its first step.
        length: its steps.
        value: from steps since `start` (float32) to the value.
    """

    name: str
    start: int
    length: int
    value: Callable[[jax.Array], jax.Array]


class Schedule:
    """Step to value. Before step 0 and after the last segment the nearest end holds."""

    def __init__(self, segments: Sequence[Segment]):
        self.segments = tuple(segments)

    def __call__(self, step: int | jax.Array) -> jax.Array:
        """The value for the update that follows `step` updates: float32, traceable."""
        step = jnp.asarray(step, jnp.float32)
        value = self._in(self.segments[0], step)
        for segment in self.segments[1:]:
            value = jnp.where(step >= segment.start, self._in(segment, step), value)
        return value

    def corner_points(self) -> list[tuple[int, float, str]]:
        """(step, value, what begins or ends there), for people."""
        points = [(s.start, float(self(s.start)), f"{s.name} from") for s in self.segments]
        last = self.segments[-1]
        return [*points, (last.start + last.length, float(self(last.start + last.length)), "end")]

    @staticmethod
    def _in(segment: Segment, step: jax.Array) -> jax.Array:
        return segment.value(jnp.clip(step - segment.start, 0, segment.length))


def make_schedule(shape: Shape, num_steps: int) -> Schedule:
    """The schedule of a run, or a phase, of `num_steps` steps.

    Warmup is cut to the run and decay to what warmup leaves, so no part ever overwrites another.

    Raises:
        ConfigError: an unknown kind, or a length that is neither a fraction from 0 to 1 nor a whole number of steps.
    """
    if shape.kind not in _DECAYS:
        raise ConfigError(f"optimizer.lr_schedule: '{shape.kind}' given. Allowed: {', '.join(_DECAYS)}")
    if not 0 <= shape.min_ratio <= 1:
        raise ConfigError(f"optimizer.min_lr_ratio: {shape.min_ratio} given, 0 to 1 expected")
    warmup = min(num_of_steps("warmup", shape.warmup, num_steps), num_steps)
    left = num_steps - warmup
    decay = left if shape.decay is None else min(num_of_steps("decay", shape.decay, num_steps), left)
    peak = shape.peak
    segments = []
    if warmup:
        segments.append(Segment("warmup", 0, warmup, lambda t: peak * t / warmup))
    if left > decay or not left:
        segments.append(Segment("stable", warmup, left - decay, lambda t: jnp.full_like(t, peak)))
    if decay:
        segments.append(Segment("decay", num_steps - decay, decay, _DECAYS[shape.kind](shape, warmup, decay)))
    return Schedule(segments)


def num_of_steps(name: str, value: int | float, num_steps: int) -> int:
    """Steps that a length stands for: up to 1 it is a fraction of `num_steps`, above it a number of steps.

    So 1 means all steps, not one. Raises `ConfigError` below 0 and for broken numbers above 1.
    """
    if value < 0 or (value > 1 and value != int(value)):
        raise ConfigError(
            f"optimizer.{name}: {value} given. Allowed: a fraction from 0 to 1 (1 means the whole run), or a whole number"
            " of steps from 2"
        )
    return int(value * num_steps) if value <= 1 else int(value)


def _constant(shape: Shape, warmup: int, length: int) -> Callable[[jax.Array], jax.Array]:
    return lambda t: jnp.full_like(t, shape.peak)


def _linear(shape: Shape, warmup: int, length: int) -> Callable[[jax.Array], jax.Array]:
    return lambda t: shape.peak * (1 - (1 - shape.min_ratio) * t / length)


def _cosine(shape: Shape, warmup: int, length: int) -> Callable[[jax.Array], jax.Array]:
    low = shape.min_ratio
    return lambda t: shape.peak * (low + (1 - low) * 0.5 * (1 + jnp.cos(jnp.pi * t / length)))


def _inv_sqrt(shape: Shape, warmup: int, length: int) -> Callable[[jax.Array], jax.Array]:
    def value(t: jax.Array) -> jax.Array:
        falling = jnp.minimum(1.0, jax.lax.rsqrt(jnp.maximum(t + warmup, 1.0) / _INV_SQRT_TIMESCALE))
        return shape.peak * jnp.maximum(falling, shape.min_ratio)

    return value


def _inv(shape: Shape, warmup: int, length: int) -> Callable[[jax.Array], jax.Array]:
    if shape.min_ratio == 0:
        raise ConfigError("optimizer.lr_schedule: inv never reaches 0. Give optimizer.min_lr_ratio above 0")
    # The first update of the decay has already come down by one step's worth.
    return lambda t: shape.peak / ((1 / shape.min_ratio - 1) * jnp.maximum(t, 1.0) / length + 1)


_DECAYS = {"constant": _constant, "linear": _linear, "cosine": _cosine, "inv_sqrt": _inv_sqrt, "inv": _inv}
