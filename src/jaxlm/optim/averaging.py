"""Averages of the model weights (EMA) over training steps, evaluated in addition to the weights themselves."""

import abc
from dataclasses import dataclass
from typing import Any

import draccus
import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core.field_types import BelowOne, NonNegativeInt, PositiveInt
from jaxlm.reading.choices import choice

AS_TRAINED = "trained"
"""The name of the weights themselves, beside those of their averages."""


class Average(eqx.Module):
    """State of a weight average.

    Attributes:
        weights: averages of the trainable leaves, in float32: 16-bit dtypes would lose the small updates.
        total: float32, sum of the weights of all steps so far.
    """

    weights: Any
    total: jax.Array


@dataclass(frozen=True)
class AveragingConfig(draccus.ChoiceRegistry, abc.ABC):
    """An average of the model weights. Each phase starts a new average from the weights at the start of the phase.

    Skipped steps do not enter the average.
    """

    @abc.abstractmethod
    def weight(self, updates: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The fraction of the new average that the newest weights contribute, and the new total of step weights.

        Args:
            updates: int32, number of updates applied in the phase before this one.
            total: float32, sum of the step weights so far.
        """

    def init_slot(self, trainable: Any) -> Average:
        """The average before the first step. Traceable."""
        return Average(jax.tree.map(lambda w: w.astype(jnp.float32), trainable), jnp.zeros((), jnp.float32))

    def update(self, average: Average, trainable: Any, updates: jax.Array) -> Average:
        """The average after an update that resulted in the weights `trainable`. Traceable."""
        weight, total = self.weight(updates, average.total)
        weights = jax.tree.map(lambda a, w: a + weight * (w.astype(jnp.float32) - a), average.weights, trainable)
        return Average(weights, total)


@choice(AveragingConfig, "ema")
class Ema(AveragingConfig):
    """Exponential moving average (Polyak and Juditsky 1992 for averaging; Izmailov et al. 2018, arXiv:1803.05407).

    Attributes:
        beta: decay rate of the average, per step.
    """

    beta: BelowOne = 0.999

    def weight(self, updates: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.asarray(1 - self.beta, jnp.float32), total


@choice(AveragingConfig, "ema_decay_sqrt")
class EmaDecaySqrt(AveragingConfig):
    """A weighted mean that replaces a learning-rate decay.

    A step has weight 1 - beta up to `switch_step`. After that its weight is 1 - sqrt(x), where x rises from 0 to 1 over
    `decay_steps`.

    Source: Hägele et al. 2024 (arXiv:2405.18392), section 3, for the form of the decay.

    Attributes:
        beta: the weight of a step is 1 - beta before `switch_step`.
        switch_step: number of updates in the phase after which step weights start to decay.
        decay_steps: length of the decay, in steps. After it, the average no longer changes.
    """

    beta: BelowOne = 0.999
    switch_step: NonNegativeInt = 100_000
    decay_steps: PositiveInt = 100_000

    def weight(self, updates: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        progress = (updates - self.switch_step).astype(jnp.float32) / self.decay_steps
        step_weight = jnp.where(progress < 0, 1 - self.beta, 1 - jnp.sqrt(jnp.clip(progress, 0.0, 1.0)))
        total = total + step_weight
        return jnp.where(total > 0, step_weight / jnp.where(total > 0, total, 1.0), 0.0), total
