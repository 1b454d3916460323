"""Learning-rate schedules: [warmup] -> [stable] -> [decay] -> {[rewarmup] -> [stable] -> [decay]} per additional cycle.

A schedule is a table of segments with a single lookup, which works for Python integers and traced ones.
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
from jaxlm.optim.lr.shapes import LrShape, ShapeSpan, lr_shape_name, lr_shape_of


@dataclass(frozen=True)
class ScheduleSpec:
    """Parameters of a schedule. Lengths are steps, or fractions of their cycle (`ScheduleLength`).

    Attributes:
        peak: highest value.
        warmup: length of the warmup from 0 to the peak in the first cycle.
        decay: length of the decay from the peak; None decays over everything after the warmup.
        kind: decay shape, or its name.
        min_ratio: value at the end of each cycle, as a fraction of the peak.
        rewarmup: length of the warmup of later cycles, from the last value of the previous cycle; 0 jumps to the peak.
        cycles: number of cycles, or the steps at which cycles end.
        cycle_length: length of each cycle, as a fraction of all steps if it is one, or a list.
        from_zero: the first step of a warmup has the value that it starts from, rather than that of one step later.
        floor: the lowest value of all steps, as a fraction of the peak.
    """

    peak: float
    warmup: int | float
    decay: int | float | None
    kind: str | LrShape
    min_ratio: float
    rewarmup: int | float = 0.0
    cycles: int | Sequence[int] | None = None
    cycle_length: int | float | Sequence[int] | None = None
    from_zero: bool = True
    floor: float = 0.0


@dataclass(frozen=True)
class Segment:
    """A segment of a schedule.

    Attributes:
        name: warmup, rewarmup, stable or decay.
        start: first step.
        length: number of steps.
        first, last: values at both ends. A decay follows its shape between them; other segments are linear. No value is
            above the peak.
        warmup: length of the same cycle's warmup in steps.
    """

    name: str
    start: int
    length: int
    first: float
    last: float
    warmup: int

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self.start + self.length


class Schedule:
    """Maps a step to a value. Steps before 0 and after the last segment get the value at the nearest end.

    Attributes:
        segments: in order, without gaps.
        only_rises: for each kind of warmup that fills its cycle, what that means.
        notes: what its lengths mean, where they may mean something other than intended.
    """

    def __init__(self, segments: Sequence[Segment], decay: LrShape, spec: ScheduleSpec, only_rises: Sequence[str] = ()):
        self.segments, self.only_rises = tuple(segments), tuple(only_rises)
        self.notes = (*only_rises, *_one_step_notes(spec))
        self._decay, self._peak, self._low = decay, spec.peak, spec.min_ratio
        self._floor = spec.floor * spec.peak
        self._starts = np.array([s.start for s in segments], np.int32)
        rows = [(s.length, s.first, s.last, s.warmup, s.name == "decay") for s in segments]
        self._table = np.array(rows, np.float32).T

    def __call__(self, step: int | np.ndarray | jax.Array) -> Any:
        """The value for the update after `step` updates, as float32. Traceable; concrete steps compile nothing."""
        xp: Any = jnp if isinstance(step, jax.Array) else np
        step = xp.asarray(step, np.int32)
        row = xp.maximum(xp.searchsorted(self._starts, step, side="right") - 1, 0)
        length, first, last, warmup, is_decay = (xp.asarray(column)[row] for column in self._table)
        since = xp.clip(xp.asarray(step - xp.asarray(self._starts)[row], np.float32), 0, length)
        line = first + (last - first) * since / length
        with np.errstate(divide="ignore"):  # a negative power of 0 tokens is inf, which the peak limits
            fallen = self._decay.value(ShapeSpan(since, length, warmup, self._peak, self._low))
        # A formula may round to just above the peak.
        value = xp.minimum(xp.where(is_decay > 0, fallen, line), self._peak)
        return xp.maximum(value, self._floor) if self._floor else value

    def corner_points(self) -> list[tuple[int, float, str]]:
        """(step, value, label) at the start of each segment and at the end, for display.

        If a cycle starts with a jump, the last value before the jump is included.
        """
        points: list[tuple[int, float, str]] = []
        for before, segment in zip((None, *self.segments), self.segments, strict=False):
            if before is not None and before.name == "decay" and segment.name != "rewarmup":
                points.append((segment.start - 1, float(self(segment.start - 1)), "cycle ends"))
            points.append((segment.start, float(self(segment.start)), f"{segment.name} begins"))
        end = self.segments[-1].end
        return [*points, (end, float(self(end)), "end")]


def make_schedule(spec: ScheduleSpec, num_steps: int) -> Schedule:
    """Builds the schedule of a run or phase of `num_steps` steps.

    Warmup is limited to the length of its cycle, and decay to the steps after the warmup, so segments never overlap.
    """
    decay = lr_shape_of(spec.kind)
    if not 0 <= spec.min_ratio <= 1:
        raise ConfigError(f"optimizer.min_lr_ratio: {spec.min_ratio} given, a number from 0 to 1 expected")
    if spec.min_ratio == 0 and not decay.reaches_zero:
        raise ConfigError(
            f"optimizer.lr_schedule: {lr_shape_name(decay)} never reaches 0. Set optimizer.min_lr_ratio above 0"
        )
    segments: list[Segment] = []
    only_rises: dict[str, str] = {}
    points = cycle_boundaries(spec.cycles, spec.cycle_length, num_steps)
    for number, (start, end) in enumerate(itertools.pairwise(points)):
        name, warmup = ("rewarmup", spec.rewarmup) if number else ("warmup", spec.warmup)
        steps = to_num_steps(name, warmup, end - start)
        if steps >= end - start:
            steps = end - start
            only_rises.setdefault(name, _whole_cycle_note(name, warmup, steps))
        low = min(segments[-1].last, spec.peak) if segments else 0.0
        ahead = 0.0 if spec.from_zero or not steps else (spec.peak - low) / steps
        rise = Segment(name, start, steps, low + ahead, spec.peak + ahead, steps)
        segments += _cycle(spec, decay, rise, end)
    return Schedule(segments, decay, spec, list(only_rises.values()))


def _whole_cycle_note(name: str, value: int | float, cycle: int) -> str:
    meaning = "means the whole cycle" if value == 1.0 else "is cut to the length of the cycle"
    return (
        f"optimizer.{name}: {value} {meaning}: the learning rate rises over all its {cycle} steps and reaches the peak only"
        " at the end"
    )


def _one_step_notes(spec: ScheduleSpec) -> Iterator[str]:
    lengths = {"warmup": spec.warmup, "decay": spec.decay, "rewarmup": spec.rewarmup, "cycle_length": spec.cycle_length}
    for name, length in lengths.items():
        if isinstance(length, int) and length == 1:
            yield f"optimizer.{name}: 1 means one step. For all steps, which it means in Levanter, write 1.0"


def _cycle(spec: ScheduleSpec, decay: LrShape, warmup: Segment, end: int) -> Iterator[Segment]:
    """The non-empty segments of a cycle that starts with `warmup`, which may be empty, and ends at `end`."""
    remaining = end - warmup.end
    falling = remaining if spec.decay is None else _decay_steps(spec.decay, decay, end - warmup.start, remaining)
    if warmup.length:
        yield warmup
    if remaining > falling:
        yield Segment("stable", warmup.end, remaining - falling, spec.peak, spec.peak, warmup.length)
    if falling:
        at = ShapeSpan(float(falling), float(falling), float(warmup.length), spec.peak, spec.min_ratio)
        last = float(decay.value(at))
        yield Segment("decay", end - falling, falling, spec.peak, last, warmup.length)


def _decay_steps(length: int | float, decay: LrShape, cycle: int, remaining: int) -> int:
    steps = to_num_steps("decay", length, cycle)
    if not steps and not decay.may_be_empty:
        raise ConfigError(
            f"optimizer.decay: {length} of a cycle of {cycle} steps is 0 steps, so lr_schedule {lr_shape_name(decay)} has"
            " no effect. Set a longer decay, or lr_schedule: constant"
        )
    return min(steps, remaining)


def to_num_steps(name: str, length: int | float, num_steps: int) -> int:
    """Converts a `ScheduleLength` to steps: an integer is a number of steps, a float up to 1.0 a fraction of `num_steps`."""
    if length < 0 or (length > 1 and length != int(length)):
        raise ConfigError(
            f"optimizer.{name}: {length} given. Allowed: a fraction from 0.0 to 1.0, or a whole number of steps (1 is one"
            " step, 1.0 all of them)"
        )
    return int(length * num_steps) if isinstance(length, float) and length <= 1 else int(length)


def cycle_boundaries(
    cycles: int | Sequence[int] | None, cycle_length: int | float | Sequence[int] | None, num_steps: int
) -> list[int]:
    """Cycle boundaries of a schedule of `num_steps` steps: 0, the end of every cycle, `num_steps`.

    Args:
        cycles: number of cycles, or the steps at which cycles end.
        cycle_length: length of each cycle in steps or as a fraction of all steps, or a list of lengths of the first
            cycles. Steps that do not fill another cycle are added to the last one.
    """
    if cycles is not None and cycle_length is not None:
        raise ConfigError("optimizer: cycles and cycle_length are both set. Remove one")
    if cycles is not None:
        inner, name = _by_cycles(cycles, num_steps), f"cycles: {cycles}"
    elif cycle_length is not None:
        inner, name = _by_length(cycle_length, num_steps), f"cycle_length: {cycle_length}"
    else:
        inner, name = [], "no cycles"
    points = [0, *inner] if inner and inner[-1] == num_steps else [0, *inner, num_steps]
    if any(low >= high for low, high in itertools.pairwise(points)):
        raise ConfigError(
            f"optimizer.{name}: the cycle boundaries {_format_points(points)} must increase and be within the"
            f" {num_steps} steps"
        )
    return points


def _by_cycles(cycles: int | Sequence[int], num_steps: int) -> list[int]:
    if not isinstance(cycles, int):
        return list(cycles)
    if not 1 <= cycles <= num_steps:
        raise ConfigError(f"optimizer.cycles: {cycles} given, 1 to {num_steps} (the number of steps) expected")
    return [int(num_steps / cycles * number) for number in range(1, cycles)]


def _by_length(length: int | float | Sequence[int], num_steps: int) -> list[int]:
    if not isinstance(length, (int, float)):
        return list(itertools.accumulate(length))
    steps = to_num_steps("cycle_length", length, num_steps)
    if steps < 1:
        raise ConfigError(f"optimizer.cycle_length: {length} of {num_steps} steps is less than one step")
    return [steps * number for number in range(1, num_steps // steps)]


def _format_points(points: Sequence[int]) -> str:
    texts = [str(p) for p in points]
    return ", ".join(texts if len(texts) <= 12 else [*texts[:6], "...", *texts[-3:]])
