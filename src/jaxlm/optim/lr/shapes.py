"""Shapes of the learning-rate decay: the formulas that `lr_schedule` selects."""

import abc
import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import draccus
import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveFloat, PositiveInt
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
