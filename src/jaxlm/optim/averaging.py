"""Averages of the weights over the steps, kept and evaluated beside the weights themselves."""

import abc
from dataclasses import dataclass
from typing import Any

import draccus
import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core.errors import ConfigError


class Average(eqx.Module):
    """An average so far.

    Attributes:
        weights: the trainable leaves, float32: in 16 bit the small steps of an average would be lost.
        total: float32, the sum of the shares that every step has had so far.
    """

    weights: Any
    total: jax.Array


@dataclass(frozen=True)
class AveragingConfig(draccus.ChoiceRegistry, abc.ABC):
    """An average of the weights. It begins with the weights at the start of a phase, and anew in every phase.

    Steps that are left out are not averaged either.
    """

    @abc.abstractmethod
    def weight(self, updates: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What of the average the newest weights become, and the new total of shares.

        Args:
            updates: int32, applied before this one in the phase.
            total: of the shares so far.
        """

    def init_slot(self, trainable: Any) -> Average:
        """The average before the first step. Traceable."""
        return Average(jax.tree.map(lambda w: w.astype(jnp.float32), trainable), jnp.zeros((), jnp.float32))

    def update(self, average: Average, trainable: Any, updates: jax.Array) -> Average:
        """The average after one more update, which made the weights `trainable`. Traceable."""
        weight, total = self.weight(updates, average.total)
        weights = jax.tree.map(lambda a, w: a + weight * (w.astype(jnp.float32) - a), average.weights, trainable)
        return Average(weights, total)


@AveragingConfig.register_subclass("ema")
@dataclass(frozen=True)
class Ema(AveragingConfig):
    """Exponential moving average (Polyak and Juditsky 1992 for averaging; Izmailov et al. 2018, arXiv:1803.05407).

    Attributes:
        beta: what of the average stays at every step.
    """

    beta: float = 0.999

    def __post_init__(self):
        _check_beta(self.beta)

    def weight(self, updates: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Always the same."""
        return jnp.asarray(1 - self.beta, jnp.float32), total


@AveragingConfig.register_subclass("ema_decay_sqrt")
@dataclass(frozen=True)
class EmaDecaySqrt(AveragingConfig):
    """A weighted mean that stands in for a decay of the learning rate: every step counts 1 - beta up to `switch_step`,
    and from there 1 - sqrt(x), x going from 0 to 1 in `decay_steps`.

    Source: Hägele et al. 2024 (arXiv:2405.18392), section 3, for the form of the decay.

    Attributes:
        beta: 1 - beta is what a step counts before the switch.
        switch_step: updates of the phase before the weights begin to fall off.
        decay_steps: after so many more, a step counts nothing and the average stands still.
    """

    beta: float = 0.999
    switch_step: int = 100_000
    decay_steps: int = 100_000

    def __post_init__(self):
        _check_beta(self.beta)
        if self.switch_step < 0 or self.decay_steps < 1:
            raise ConfigError(
                f"trainer.model_averaging: switch_step {self.switch_step}, decay_steps {self.decay_steps} given; 0 and"
                " more, and 1 and more, expected"
            )

    def weight(self, updates: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The step's count over the sum of all so far."""
        past = (updates - self.switch_step).astype(jnp.float32) / self.decay_steps
        count = jnp.where(past < 0, 1 - self.beta, 1 - jnp.sqrt(jnp.clip(past, 0.0, 1.0)))
        total = total + count
        return jnp.where(total > 0, count / jnp.where(total > 0, total, 1.0), 0.0), total


def _check_beta(beta: float) -> None:
    if not 0 <= beta < 1:
        raise ConfigError(f"trainer.model_averaging.beta: {beta} given, from 0 up to 1 expected")
