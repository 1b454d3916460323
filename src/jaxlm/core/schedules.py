"""Learning rate by step: [warmup] -> [stable] -> [decay] -> {[rewarmup] -> [stable] -> [decay]} x more cycles.

A schedule is a table of segments with one look-up for all of them, the same for a Python integer and for a traced one.
Source of the warmup-stable-decay form: Hu et al. 2024, MiniCPM (arXiv:2404.06395), section 4; of its cycles: Wen et al.
2024 (arXiv:2410.05192), section 4.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.lr_shapes import LrShape, ShapeSpan, lr_shape_name, lr_shape_of


@dataclass(frozen=True)
class ScheduleSpec:
    """What a schedule looks like, in numbers. Lengths are steps, or fractions of their cycle.

    Attributes:
        peak: the highest value.
        warmup: from 0 up to the peak, in the first cycle.
        decay: from the peak down; None decays over all that warmup leaves.
        kind: the way down, or its name.
        min_ratio: the last value of a cycle as a fraction of the peak.
        rewarmup: from the last value of a cycle up to the peak of the next; 0 jumps.
        cycles: how many, or the low points between them.
        cycle_length: of each: steps, a fraction of the whole, or a list.
    """

    peak: float
    warmup: int | float
    decay: int | float | None
    kind: str | LrShape
    min_ratio: float
    rewarmup: int | float = 0.0
    cycles: int | Sequence[int] | None = None
    cycle_length: int | float | Sequence[int] | None = None


@dataclass(frozen=True)
class Segment:
    """One stretch of a schedule.

    Attributes:
        name: warmup, rewarmup, stable or decay.
        start: its first step.
        length: its steps.
        first, last: its values at both ends; a decay's way between them is its formula's, the others' a straight line.
        warmup: steps of its cycle's warmup.
    """

    name: str
    start: int
    length: int
    first: float
    last: float
    warmup: int

    @property
    def end(self) -> int:
        """The step after its last."""
        return self.start + self.length


class Schedule:
    """Step to value. Before step 0 and after the last segment the nearest end holds."""

    def __init__(self, segments: Sequence[Segment], decay: LrShape, peak: float, low: float):
        self.segments = tuple(segments)
        self._decay, self._peak, self._low = decay, peak, low
        self._starts = np.array([s.start for s in segments], np.int32)
        rows = [(s.length, s.first, s.last, s.warmup, s.name == "decay") for s in segments]
        self._table = np.array(rows, np.float32).T

    def __call__(self, step: int | np.ndarray | jax.Array) -> Any:
        """The value for the update that follows `step` updates: float32, traceable. Known steps compile nothing."""
        xp: Any = jnp if isinstance(step, jax.Array) else np
        step = xp.asarray(step, np.int32)
        row = xp.maximum(xp.searchsorted(self._starts, step, side="right") - 1, 0)
        length, first, last, warmup, is_decay = (xp.asarray(column)[row] for column in self._table)
        since = xp.clip(xp.asarray(step - xp.asarray(self._starts)[row], np.float32), 0, length)
        line = first + (last - first) * since / length
        with np.errstate(divide="ignore"):  # a power of 0 tokens, which the peak bounds
            fallen = self._decay.value(ShapeSpan(since, length, warmup, self._peak, self._low))
        return xp.minimum(xp.where(is_decay > 0, fallen, line), self._peak)  # a formula may round to just above it

    def corner_points(self) -> list[tuple[int, float, str]]:
        """(step, value, what begins or ends there), for people; where a cycle jumps, the last value before it too."""
        points: list[tuple[int, float, str]] = []
        for before, segment in zip((None, *self.segments), self.segments, strict=False):
            if before is not None and before.name == "decay" and segment.name != "rewarmup":
                points.append((segment.start - 1, float(self(segment.start - 1)), "cycle's last"))
            points.append((segment.start, float(self(segment.start)), f"{segment.name} from"))
        end = self.segments[-1].end
        return [*points, (end, float(self(end)), "end")]


def make_schedule(shape: ScheduleSpec, num_steps: int) -> Schedule:
    """The schedule of a run, or a phase, of `num_steps` steps.

    Warmup is cut to its cycle and decay to what warmup leaves, so no part ever overwrites another.

    Raises:
        ConfigError: an unknown decay, low points that do not fit, or a length that is neither a fraction from 0 to 1
            nor a whole number of steps.
    """
    decay = lr_shape_of(shape.kind)
    if not 0 <= shape.min_ratio <= 1:
        raise ConfigError(f"optimizer.min_lr_ratio: {shape.min_ratio} given, 0 to 1 expected")
    if shape.min_ratio == 0 and not decay.reaches_zero:
        raise ConfigError(
            f"optimizer.lr_schedule: {lr_shape_name(decay)} never reaches 0. Give optimizer.min_lr_ratio above 0"
        )
    segments: list[Segment] = []
    points = low_points(shape.cycles, shape.cycle_length, num_steps)
    for number, (start, end) in enumerate(itertools.pairwise(points)):
        name, warmup = ("rewarmup", shape.rewarmup) if number else ("warmup", shape.warmup)
        steps = min(to_num_steps(name, warmup, end - start), end - start)
        low = segments[-1].last if segments else 0.0
        segments += _cycle(shape, decay, Segment(name, start, steps, low, shape.peak, steps), end)
    return Schedule(segments, decay, shape.peak, shape.min_ratio)


def _cycle(shape: ScheduleSpec, decay: LrShape, warmup: Segment, end: int) -> Iterator[Segment]:
    """A cycle from its warmup, which may be empty, to `end`; what is empty is left out."""
    left = end - warmup.end
    falling = left if shape.decay is None else _decay_steps(shape.decay, decay, end - warmup.start, left)
    if warmup.length:
        yield warmup
    if left > falling:
        yield Segment("stable", warmup.end, left - falling, shape.peak, shape.peak, warmup.length)
    if falling:
        at = ShapeSpan(float(falling), float(falling), float(warmup.length), shape.peak, shape.min_ratio)
        last = float(decay.value(at))
        yield Segment("decay", end - falling, falling, shape.peak, last, warmup.length)


def _decay_steps(length: int | float, decay: LrShape, cycle: int, left: int) -> int:
    steps = to_num_steps("decay", length, cycle)
    if not steps and not decay.may_be_empty:
        raise ConfigError(
            f"optimizer.decay: {length} of a cycle of {cycle} steps is none at all, so that lr_schedule"
            f" {lr_shape_name(decay)} has no effect. Give a longer one, or lr_schedule: constant"
        )
    return min(steps, left)


def to_num_steps(name: str, value: int | float, num_steps: int) -> int:
    """Steps that a length stands for: up to 1 it is a fraction of `num_steps`, above it a number of steps.

    So 1 means all steps, not one.

    Raises:
        ConfigError: below 0, or a broken number above 1.
    """
    if value < 0 or (value > 1 and value != int(value)):
        raise ConfigError(
            f"optimizer.{name}: {value} given. Allowed: a fraction from 0 to 1 (1 means all of it, not one step), or a"
            " whole number of steps from 2"
        )
    return int(value * num_steps) if value <= 1 else int(value)


def low_points(
    cycles: int | Sequence[int] | None, cycle_length: int | float | Sequence[int] | None, num_steps: int
) -> list[int]:
    """Where a schedule of `num_steps` is at its lowest: 0, the end of every cycle, `num_steps`.

    Args:
        cycles: how many cycles there are, or the low points between them.
        cycle_length: of each, as steps or as a fraction of all steps, or a list of the first ones' lengths. What does not
            make another whole cycle is added to the last one.

    Raises:
        ConfigError: both are given, or there are no such low points.
    """
    if cycles is not None and cycle_length is not None:
        raise ConfigError("optimizer: both cycles and cycle_length are given. Leave one of them out")
    if cycles is not None:
        inner, name = _by_cycles(cycles, num_steps), f"cycles: {cycles}"
    elif cycle_length is not None:
        inner, name = _by_length(cycle_length, num_steps), f"cycle_length: {cycle_length}"
    else:
        inner, name = [], "no cycles"
    points = [0, *inner] if inner and inner[-1] == num_steps else [0, *inner, num_steps]
    if any(low >= high for low, high in itertools.pairwise(points)):
        raise ConfigError(
            f"optimizer.{name}: the low points {_shown(points)} must rise, and lie within the {num_steps} steps"
        )
    return points


def _by_cycles(cycles: int | Sequence[int], num_steps: int) -> list[int]:
    if not isinstance(cycles, int):
        return list(cycles)
    if not 1 <= cycles <= num_steps:
        raise ConfigError(f"optimizer.cycles: {cycles} given, 1 to {num_steps} (the steps there are) expected")
    return [int(num_steps / cycles * number) for number in range(1, cycles)]


def _by_length(length: int | float | Sequence[int], num_steps: int) -> list[int]:
    if not isinstance(length, (int, float)):
        return list(itertools.accumulate(length))
    steps = to_num_steps("cycle_length", length, num_steps)
    if steps < 1:
        raise ConfigError(f"optimizer.cycle_length: {length} of {num_steps} steps is less than one step")
    return [steps * number for number in range(1, num_steps // steps)]


def _shown(points: Sequence[int]) -> str:
    shown = [str(p) for p in points]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:6], "...", *shown[-3:]])
