"""Schedules of the learning rate, with the shapes of its decay, of a momentum and of the weight decay.

The learning rate: [warmup] -> [stable] -> [decay] -> {[rewarmup] -> [stable] -> [decay]} per additional cycle. Its schedule
is a table of segments with a single lookup, which works for Python integers and traced ones.

Source: the warmup-stable-decay form: Hu et al. 2024, MiniCPM (arXiv:2404.06395), section 4; its cycles: Wen et al. 2024
(arXiv:2410.05192), section 4.
"""

import abc
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import draccus
import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import BelowOne, PositiveFloat, PositiveInt, ScheduleLength
from jaxlm.reading.choices import choice

Number = jax.Array | np.ndarray | float


class ShapeSpan(NamedTuple):
    """Position within a decay, and its parameters. All values may be traced.

    Attributes:
        since: steps since the decay started, from 0 to `length`.
        length: length of the decay in steps.
        warmup: length of the same cycle's warmup in steps.
        peak: value at the start of the decay.
        low: value at the end of the decay, as a fraction of the peak.
    """

    since: Number
    length: Number
    warmup: Number
    peak: Number
    low: Number

    @property
    def xp(self) -> Any:
        """`jax.numpy` if any value is a jax array, otherwise NumPy, so that plots compile nothing."""
        return jnp if any(isinstance(number, jax.Array) for number in self) else np


@dataclass(frozen=True)
class LrShape(draccus.ChoiceRegistry, abc.ABC):
    """Shape of a decay, selected by `type:`. A plain name selects the shape with its default options."""

    reaches_zero: ClassVar[bool] = True
    """Whether the shape supports `min_lr_ratio: 0`."""
    may_be_empty: ClassVar[bool] = True
    """Whether an explicit decay of 0 steps is allowed and keeps the peak, rather than being an error."""

    @abc.abstractmethod
    def value(self, at: ShapeSpan) -> Number:
        """The value at a position in the decay."""


@choice(LrShape, "constant")
class Constant(LrShape):
    """Stays at the peak and ignores `min_lr_ratio`."""

    def value(self, at: ShapeSpan) -> Number:
        return at.xp.full_like(at.xp.asarray(at.since, np.float32), at.peak)


@choice(LrShape, "linear")
class Linear(LrShape):
    """Linear decay to the final value."""

    def value(self, at: ShapeSpan) -> Number:
        return at.peak * (1 - (1 - at.low) * at.since / at.length)


@choice(LrShape, "cosine")
class Cosine(LrShape):
    """Cosine decay (Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5).

    Attributes:
        exponent: exponent applied to the cosine factor, which falls from 1 to 0.
    """

    exponent: PositiveFloat = 1.0

    may_be_empty: ClassVar[bool] = False

    def value(self, at: ShapeSpan) -> Number:
        wave = 0.5 * (1 + at.xp.cos(np.pi * at.since / at.length))
        return at.peak * (at.low + (1 - at.low) * wave**self.exponent)


_LAST_STEP = 2**31  # no run is longer


@choice(LrShape, "sgdr")
class Sgdr(LrShape):
    """Cosine decays with warm restarts, each `t_mult` times as long as the one before (Loshchilov and Hutter 2017,
    arXiv:1608.03983, section 3). The end of the run cuts the last one off, so that the lengths do not depend on the run's.

    Attributes:
        first_decay: steps of the first decay, after the warmup.
        t_mult: how much longer each decay is than the one before.
    """

    first_decay: PositiveInt
    t_mult: PositiveInt = 2

    def value(self, at: ShapeSpan) -> Number:
        start, length = self._decay_around(at)
        wave = 0.5 * (1 + at.xp.cos(np.pi * (at.since - start) / length))
        return at.peak * (at.low + (1 - at.low) * wave)

    def _decay_around(self, at: ShapeSpan) -> tuple[Number, Number]:
        """Start and length of the decay in which a position lies."""
        if self.t_mult == 1:
            return at.xp.floor_divide(at.since, self.first_decay) * self.first_decay, float(self.first_decay)
        starts, lengths = [0], [self.first_decay]
        while starts[-1] + lengths[-1] < _LAST_STEP:
            starts.append(starts[-1] + lengths[-1])
            lengths.append(lengths[-1] * self.t_mult)
        table = np.array([starts, lengths], np.float32)
        number = at.xp.searchsorted(at.xp.asarray(table[0]), at.since, side="right") - 1
        return at.xp.asarray(table[0])[number], at.xp.asarray(table[1])[number]


@choice(LrShape, "polynomial")
class Polynomial(LrShape):
    """Polynomial decay: the remaining fraction of the decay, raised to a power.

    Attributes:
        power: exponent. 1 is linear; a larger power falls faster at first.
    """

    power: PositiveFloat = 1.0

    def value(self, at: ShapeSpan) -> Number:
        remaining = 1 - at.since / at.length
        return at.peak * (at.low + (1 - at.low) * remaining**self.power)


@choice(LrShape, "inv_sqrt")
class InvSqrt(LrShape):
    """Inverse square root of the step in the cycle (Vaswani et al. 2017, arXiv:1706.03762, equation 3), but at least the
    minimum. It does not depend on the length of the decay.

    Attributes:
        timescale: steps from the start of the cycle, including warmup, after which the learning rate starts to fall.
    """

    timescale: PositiveFloat = 10_000

    def value(self, at: ShapeSpan) -> Number:
        steps = at.xp.maximum(at.since + at.warmup, 1.0)
        return at.peak * at.xp.maximum(at.xp.minimum(1.0, (steps / self.timescale) ** -0.5), at.low)


@choice(LrShape, "inv")
class Inv(LrShape):
    """Inverse of the step, scaled so that it ends at the final value. Its first step is already below the peak."""

    reaches_zero: ClassVar[bool] = False

    def value(self, at: ShapeSpan) -> Number:
        return at.peak / ((1 / at.low - 1) * at.xp.maximum(at.since, 1.0) / at.length + 1)


@choice(LrShape, "power")
class Power(LrShape):
    """Power law in the number of tokens since the decay started, at most the peak (Shen et al. 2024, arXiv:2408.13359,
    equation 4). It ignores `min_lr_ratio` and the length of the decay.

    Attributes:
        batch_size: sequences per step.
        seq_length: tokens per sequence.
        a: amplitude; multiplied by `batch_size`.
        b: exponent of the number of tokens; negative.
    """

    batch_size: PositiveInt
    seq_length: PositiveInt
    a: PositiveFloat = 4.6
    b: Annotated[float, Interval(lt=0)] = -0.51

    def value(self, at: ShapeSpan) -> Number:
        tokens = at.since * float(self.batch_size) * self.seq_length
        return at.xp.minimum(at.peak, self.batch_size * self.a * tokens**self.b)


def lr_shape_of(shape: str | LrShape) -> LrShape:
    """Resolves a shape name to the shape with its default options. Shapes with required keys have no short form."""
    if isinstance(shape, LrShape):
        return shape
    known: dict[str, Any] = LrShape.get_known_choices()
    if shape not in known:
        raise ConfigError(f"optimizer.lr_schedule: '{shape}' given. Allowed: {', '.join(known)}")
    required = [f.name for f in dataclasses.fields(known[shape]) if f.default is dataclasses.MISSING]
    if required:
        keys = ", ".join(f"{name}: ..." for name in required)
        raise ConfigError(f"optimizer.lr_schedule: '{shape}' needs keys. Set {{type: {shape}, {keys}}}")
    return known[shape]()


def lr_shape_name(shape: str | LrShape) -> str:
    """The name of a shape, for messages."""
    return shape if isinstance(shape, str) else shape.get_choice_name(type(shape))


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


DecayFactor = Literal["constant", "linear", "cosine"]
"""Shape of the factor of the weight decay, which falls from 1 to 0 over the phase unless it is constant."""


class ScheduledMomentum(NamedTuple):
    """A momentum whose decay rate follows a schedule.

    Attributes:
        count: int32, number of updates so far: the position in the schedule.
        mean: with the structure of the parameters.
    """

    count: jax.Array
    mean: Any


@dataclass(frozen=True)
class MomentumSchedule:
    """Rises along a line to the optimizer's `momentum`, and falls along another while the learning rate decays.

    Attributes:
        initial: decay rate of the momentum in the first update.
        warmup: number of updates until it is `momentum`, or a fraction of the phase (1.0 is all of it, 1 one update). A phase
            that ends before does not shorten it.
        final: decay rate at the end of the phase, which it falls to over the last decay of the learning rate. Null keeps
            `momentum`.
    """

    initial: BelowOne = 0.85
    warmup: ScheduleLength = 300
    final: BelowOne | None = None

    def build(self, momentum: float, rate: Schedule, num_steps: int) -> Callable[[jax.Array], jax.Array]:
        """The decay rate of the momentum, as a function of the number of updates before.

        Args:
            momentum: its value after the warmup.
            rate: the learning rate's schedule.
        """
        warmup = to_num_steps("momentum_schedule.warmup", self.warmup, num_steps)
        decay = None if self.final is None else self._decay(rate)

        def value(count: jax.Array) -> jax.Array:
            rising = self.initial + (momentum - self.initial) * count / max(warmup, 1)
            after = jnp.asarray(momentum, jnp.float32)
            if self.final is not None and decay is not None:
                passed = jnp.clip((count - decay.start) / decay.length, 0.0, 1.0)
                after = momentum + (self.final - momentum) * passed
            return jnp.where(count < warmup, rising, after)

        return value

    def _decay(self, rate: Schedule) -> Segment:
        # Values are float32: that of a constant learning rate may be its peak rounded down.
        falling = [s for s in rate.segments if s.name == "decay" and np.float32(s.last) < np.float32(s.first)]
        if not falling and rate.only_rises:
            raise ConfigError(
                f"{rate.only_rises[0]}. No decay is left, over which the momentum would fall to"
                f" optimizer.momentum_schedule.final ({self.final}). Set a shorter warmup, or momentum_schedule.final: null"
            )
        if not falling:
            raise ConfigError(
                f"optimizer.momentum_schedule.final: {self.final} given, but the learning rate does not decay, so the"
                " momentum would never reach it. Set optimizer.lr_schedule and optimizer.decay, or remove it"
            )
        return falling[-1]


def decay_factor(shape: DecayFactor, num_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Returns the factor of the weight decay, as a function of the number of updates before."""

    def value(count: jax.Array) -> jax.Array:
        passed = jnp.clip(count / num_steps, 0.0, 1.0)
        if shape == "linear":
            return 1.0 - passed
        return 0.5 * (1.0 + jnp.cos(np.pi * passed)) if shape == "cosine" else jnp.ones_like(passed)

    return value
