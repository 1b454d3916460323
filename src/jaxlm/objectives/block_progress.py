"""What blockwise distillation remembers of each block: how far it is, whether it has converged, and the scale of its learning
rate. Every number is a vector with an entry for each block, so that a decision about one of them changes no other.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core.field_types import (
    STEPS_OF_PHASE,
    BelowOne,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    ProperFraction,
)

# A spike is measured against recent steps: their mean forgets faster than their spread.
_SPREAD_DECAY = 0.99
_MIN_OBSERVED = 20
_WINSOR = 3.0  # a spike widens the spread no more than a step of this many deviations


@dataclass(frozen=True)
class Convergence:
    """When a block has learned enough. It then stays as it is, with its optimizer state.

    Attributes:
        target: a block is done when its averaged error is at most this; null has no such limit.
        patience: a block is done after this many of its steps in a row without improvement; null has no such limit.
        min_delta: the averaged error must be lower by more than this to count as an improvement.
        max_steps: a block is done after this many of its steps; null has no such limit.
        min_steps: a block is not done before this many of its steps.
        decay: of the running average of the error, which has no bias at its start. 0 takes each step by itself.
    """

    target: PositiveFloat | None = None
    patience: Annotated[PositiveInt, STEPS_OF_PHASE] | None = None
    min_delta: NonNegativeFloat = 0.0
    max_steps: Annotated[PositiveInt, STEPS_OF_PHASE] | None = None
    min_steps: PositiveInt = 1
    decay: BelowOne = 0.9


@dataclass(frozen=True)
class Autotune:
    """Lowers the learning rate of a block whose error spikes, or no longer improves.

    Attributes:
        mode: `active` lowers it. `monitor` computes and logs the same, and changes nothing. `off` does neither.
        patience: steps in a row without improvement after which the learning rate is lowered.
        decay: factor of the learning rate.
        min_scale: lowest product of these factors.
        spike_std: an error is a spike if it is above the average of recent steps by more than this many standard deviations.
    """

    mode: Literal["off", "monitor", "active"] = "off"
    patience: Annotated[PositiveInt, STEPS_OF_PHASE] = 100
    decay: ProperFraction = 0.5
    min_scale: PositiveFraction = 0.01
    spike_std: PositiveFloat = 3.0


class BlockProgress(eqx.Module):
    """The state between steps. All arrays are {blocks}, float32 or int32.

    Attributes:
        total, weight: sums of the errors over the microbatches of a step, and of tokens (a scalar).
        steps: number of updates of the block.
        average: running average of its error.
        best, stale: the lowest average, and the number of steps since it improved.
        done: 1 if the block no longer trains.
        scale: of its learning rate.
        level, drift, spread, observed: recent mean of the error, how far the error is from it on average because it falls,
            and the variance around both; and the number of steps that they are from.
        flat: steps without improvement since the learning rate was lowered.
        events: how often the learning rate was lowered, or would have been.
    """

    total: jax.Array
    weight: jax.Array
    steps: jax.Array
    average: jax.Array
    best: jax.Array
    stale: jax.Array
    done: jax.Array
    scale: jax.Array
    level: jax.Array
    drift: jax.Array
    spread: jax.Array
    observed: jax.Array
    flat: jax.Array
    events: jax.Array

    @staticmethod
    def init(num_blocks: int) -> "BlockProgress":
        """Of no steps."""
        zeros, counts = jnp.zeros(num_blocks, jnp.float32), jnp.zeros(num_blocks, jnp.int32)
        return BlockProgress(
            total=zeros,
            weight=jnp.zeros((), jnp.float32),
            steps=counts,
            average=zeros,
            best=jnp.full(num_blocks, jnp.inf, jnp.float32),
            stale=counts,
            done=counts,
            scale=jnp.ones(num_blocks, jnp.float32),
            level=zeros,
            drift=zeros,
            spread=zeros,
            observed=counts,
            flat=counts,
            events=counts,
        )

    @property
    def current(self) -> jax.Array:
        """int32, the first block that is not done; the number of blocks if all are."""
        return jnp.sum(jnp.cumprod(self.done))

    def with_errors(self, total: jax.Array, weight: jax.Array) -> "BlockProgress":
        """With the errors of one more microbatch. Args: total: {blocks}; weight: number of tokens."""
        summed = (self.total + jax.lax.stop_gradient(total), self.weight + weight)
        return eqx.tree_at(lambda p: (p.total, p.weight), self, summed)

    def after_update(self, trained: jax.Array, convergence: Convergence, autotune: Autotune) -> "BlockProgress":
        """After a step that updated some blocks. Args: trained: bool {blocks}, those."""
        error = self.total / jnp.maximum(self.weight, 1.0)
        steps = self.steps + 1
        # Written so, the average of a constant is the constant, to the bit.
        average = self.average + _newest(convergence.decay, steps) * (error - self.average)
        improved = average < self.best - convergence.min_delta
        best, stale = jnp.where(improved, average, self.best), jnp.where(improved, 0, self.stale + 1)
        ends = jnp.zeros_like(improved)
        if convergence.target is not None:
            ends |= average <= convergence.target
        if convergence.patience is not None:
            ends |= stale >= convergence.patience
        ends &= steps >= convergence.min_steps
        if convergence.max_steps is not None:
            ends |= steps >= convergence.max_steps
        after = BlockProgress(
            total=jnp.zeros_like(self.total),
            weight=jnp.zeros_like(self.weight),
            steps=steps,
            average=average,
            best=best,
            stale=stale,
            done=ends.astype(jnp.int32),
            **self._tuned(error, improved, convergence.decay, autotune),
        )
        kept = eqx.tree_at(lambda p: (p.total, p.weight), self, (after.total, after.weight))
        return jax.tree.map(lambda new, old: jnp.where(trained, new, old) if new.ndim else new, after, kept)

    def _tuned(self, error: jax.Array, improved: jax.Array, decay: float, autotune: Autotune) -> dict[str, jax.Array]:
        """What follows for the learning rate of each block."""
        if autotune.mode == "off":
            fields = ("scale", "level", "drift", "spread", "observed", "flat", "events")
            return {name: getattr(self, name) for name in fields}
        # The mean lags behind an error that falls, by an amount that is itself averaged.
        residual = error - self.level
        surprise, deviation = residual - self.drift, jnp.sqrt(self.spread)
        is_known = self.observed >= _MIN_OBSERVED
        spikes = is_known & (surprise > autotune.spike_std * deviation)
        limit = jnp.where(is_known, _WINSOR * deviation, jnp.inf)
        surprise = jnp.clip(surprise, -limit, limit)
        residual = self.drift + surprise
        # The first error is the level, and the first residuals are the drift; only then are there deviations.
        observed = self.observed + 1
        level = self.level + _newest(decay, observed) * residual
        drift = jnp.where(observed > 1, self.drift + _newest(decay, observed - 1) * surprise, 0.0)
        spread = jnp.where(
            observed > 2, self.spread + _newest(_SPREAD_DECAY, observed - 2) * (surprise * surprise - self.spread), 0.0
        )
        flat = jnp.where(improved, 0, self.flat + 1)
        lowers = spikes | (flat >= autotune.patience)
        scale = jnp.where(lowers, jnp.maximum(self.scale * autotune.decay, autotune.min_scale), self.scale)
        restarts = lambda value: jnp.where(lowers, jnp.zeros_like(value), value)  # noqa: E731
        return {
            "scale": scale,
            "level": restarts(level),
            "drift": restarts(drift),
            "spread": restarts(spread),
            "observed": restarts(observed),
            "flat": restarts(flat),
            "events": self.events + lowers,
        }


def _newest(decay: float, count: jax.Array) -> jax.Array:
    """The weight of the newest of `count` numbers in an average without bias, in which weights fall by `decay`."""
    return (1 - decay) / (1 - decay ** jnp.maximum(count, 1).astype(jnp.float32))
