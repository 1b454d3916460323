"""Schedules of a momentum and of the weight decay."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import BelowOne, ScheduleLength
from jaxlm.optim.lr.schedules import Schedule, Segment, to_num_steps

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
    """What the weight decay is multiplied by, as a function of the number of updates before."""

    def value(count: jax.Array) -> jax.Array:
        passed = jnp.clip(count / num_steps, 0.0, 1.0)
        if shape == "linear":
            return 1.0 - passed
        return 0.5 * (1.0 + jnp.cos(np.pi * passed)) if shape == "cosine" else jnp.ones_like(passed)

    return value
