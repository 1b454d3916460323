"""How a learning rate comes down from its peak: the formulas that `lr_schedule` names."""

import abc
import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import draccus
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.errors import ConfigError

Number = jax.Array | np.ndarray | float


class ShapeSpan(NamedTuple):
    """Where in a decay a value is asked for. All may be traced.

    Attributes:
        since: steps since the decay began, from 0 to `length`.
        length: steps of the decay.
        warmup: steps of the warmup of the same cycle.
        peak: the value that it comes down from.
        low: the last value, as a fraction of the peak.
    """

    since: Number
    length: Number
    warmup: Number
    peak: Number
    low: Number

    @property
    def xp(self) -> Any:
        """NumPy where all is known (a picture compiles nothing), jax's form of it where something is traced."""
        return jnp if any(isinstance(number, jax.Array) for number in self) else np


@dataclass(frozen=True)
class LrShape(draccus.ChoiceRegistry, abc.ABC):
    """A way down, by `type:`. A plain name means the same with its defaults."""

    reaches_zero: ClassVar[bool] = True
    """Whether `min_lr_ratio: 0` makes sense."""
    may_be_empty: ClassVar[bool] = True
    """Whether a decay that is written down as no steps at all leaves the peak as it is, rather than being a mistake."""

    @abc.abstractmethod
    def value(self, at: ShapeSpan) -> Number:
        """The value there."""


@LrShape.register_subclass("constant")
@dataclass(frozen=True)
class Constant(LrShape):
    """Stays at the peak; `min_lr_ratio` has no meaning then."""

    def value(self, at: ShapeSpan) -> Number:
        return at.xp.full_like(at.xp.asarray(at.since, np.float32), at.peak)


@LrShape.register_subclass("linear")
@dataclass(frozen=True)
class Linear(LrShape):
    """A straight line down to the low value."""

    def value(self, at: ShapeSpan) -> Number:
        return at.peak * (1 - (1 - at.low) * at.since / at.length)


@LrShape.register_subclass("cosine")
@dataclass(frozen=True)
class Cosine(LrShape):
    """Half a wave of the cosine (Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5).

    Attributes:
        exponent: what the half wave, from 1 to 0, is raised to.
    """

    exponent: float = 1.0

    may_be_empty: ClassVar[bool] = False

    def __post_init__(self):
        if not self.exponent > 0:
            raise ConfigError(f"optimizer.lr_schedule.exponent: {self.exponent} given, more than 0 expected")

    def value(self, at: ShapeSpan) -> Number:
        wave = 0.5 * (1 + at.xp.cos(np.pi * at.since / at.length))
        return at.peak * (at.low + (1 - at.low) * wave**self.exponent)


@LrShape.register_subclass("polynomial")
@dataclass(frozen=True)
class Polynomial(LrShape):
    """What is left of the decay, raised to a power.

    Attributes:
        power: 1 is a straight line, more falls faster at first.
    """

    power: float = 1.0

    def __post_init__(self):
        if not self.power > 0:
            raise ConfigError(f"optimizer.lr_schedule.power: {self.power} given, more than 0 expected")

    def value(self, at: ShapeSpan) -> Number:
        left = 1 - at.since / at.length
        return at.peak * (at.low + (1 - at.low) * left**self.power)


@LrShape.register_subclass("inv_sqrt")
@dataclass(frozen=True)
class InvSqrt(LrShape):
    """One over the root of the cycle's steps (Vaswani et al. 2017, arXiv:1706.03762, equation 3), never below the low
    value; the decay's length does not matter.

    Attributes:
        timescale: steps of a cycle, warmup included, before it falls at all.
    """

    timescale: float = 10_000

    def __post_init__(self):
        if not self.timescale > 0:
            raise ConfigError(f"optimizer.lr_schedule.timescale: {self.timescale} given, more than 0 expected")

    def value(self, at: ShapeSpan) -> Number:
        steps = at.xp.maximum(at.since + at.warmup, 1.0)
        return at.peak * at.xp.maximum(at.xp.minimum(1.0, (steps / self.timescale) ** -0.5), at.low)


@LrShape.register_subclass("inv")
@dataclass(frozen=True)
class Inv(LrShape):
    """One over the steps, so scaled that it ends at the low value. Its first step has already come down."""

    reaches_zero: ClassVar[bool] = False

    def value(self, at: ShapeSpan) -> Number:
        return at.peak / ((1 / at.low - 1) * at.xp.maximum(at.since, 1.0) / at.length + 1)


@LrShape.register_subclass("power")
@dataclass(frozen=True)
class Power(LrShape):
    """A power of the tokens since the decay began, but never above the peak (Shen et al. 2024, arXiv:2408.13359,
    equation 4); neither `min_lr_ratio` nor the decay's length matters.

    Attributes:
        batch_size: sequences a step.
        seq_length: tokens a sequence.
        a: amplitude; `batch_size` multiplies it.
        b: exponent of the tokens.
    """

    batch_size: int
    seq_length: int
    a: float = 4.6
    b: float = -0.51

    def __post_init__(self):
        if self.a <= 0 or self.b >= 0 or self.batch_size < 1 or self.seq_length < 1:
            raise ConfigError(
                f"optimizer.lr_schedule: a power of a={self.a}, b={self.b}, batch_size={self.batch_size},"
                f" seq_length={self.seq_length} given; a above 0, b below 0 and sizes of 1 and more expected"
            )

    def value(self, at: ShapeSpan) -> Number:
        tokens = at.since * float(self.batch_size) * self.seq_length
        return at.xp.minimum(at.peak, self.batch_size * self.a * tokens**self.b)


def lr_shape_of(given: str | LrShape) -> LrShape:
    """The decay that a plain name stands for.

    Raises:
        ConfigError: there is none of that name, or it has keys without a default.
    """
    if isinstance(given, LrShape):
        return given
    known: dict[str, Any] = LrShape.get_known_choices()
    if given not in known:
        raise ConfigError(f"optimizer.lr_schedule: '{given}' given. Allowed: {', '.join(known)}")
    required = [f.name for f in dataclasses.fields(known[given]) if f.default is dataclasses.MISSING]
    if required:
        keys = ", ".join(f"{name}: ..." for name in required)
        raise ConfigError(f"optimizer.lr_schedule: '{given}' needs keys: {{type: {given}, {keys}}}")
    return known[given]()


def lr_shape_name(given: str | LrShape) -> str:
    """The name of a decay, for people."""
    return given if isinstance(given, str) else given.get_choice_name(type(given))
