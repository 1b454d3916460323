"""Loss scaling: what keeps small gradients from vanishing in float16.

Source: Micikevicius et al. 2018, Mixed Precision Training (arXiv:1710.03740), section 3.2; grown and shrunk as in the
same group's later libraries. The scale is a power of two, so in any dtype with room for it scaling changes no bit.
"""

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core.judge import Judge, Judgement, Signs

T = TypeVar("T")


class LossScale(abc.ABC):
    """A factor on the loss before the backward pass, taken out of the gradient after it."""

    @property
    @abc.abstractmethod
    def judges(self) -> tuple[Judge, ...]:
        """What follows the steps to choose the factor."""

    @abc.abstractmethod
    def scaled(self, loss: jax.Array, slots: dict[str, Any]) -> jax.Array:
        """The loss times the factor."""

    @abc.abstractmethod
    def unscaled(self, gradient: T, slots: dict[str, Any]) -> T:
        """The gradient without it."""


@dataclass(frozen=True)
class Unscaled(LossScale):
    """No factor, and nothing is computed."""

    @property
    def judges(self) -> tuple[Judge, ...]:
        """None."""
        return ()

    def scaled(self, loss: jax.Array, slots: dict[str, Any]) -> jax.Array:
        """The loss itself."""
        return loss

    def unscaled(self, gradient: T, slots: dict[str, Any]) -> T:
        """The gradient itself."""
        return gradient


class ScaleState(eqx.Module):
    """The factor, and what the next one depends on.

    Attributes:
        scale: float32, a power of two.
        good_steps: int32, finite steps since it last changed.
    """

    scale: jax.Array
    good_steps: jax.Array


@dataclass(frozen=True)
class DynamicLossScale(LossScale, Judge):
    """Halves the factor after a step that is not finite, and doubles it after so many that were.

    Attributes:
        initial: the first factor.
        growth_interval: finite steps in a row before it is doubled.
        smallest, largest: it stays between them.
    """

    name: ClassVar[str] = "loss_scale"

    initial: float = 2.0**15
    growth_interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    @property
    def judges(self) -> tuple[Judge, ...]:
        """Itself."""
        return (self,)

    def scaled(self, loss: jax.Array, slots: dict[str, Any]) -> jax.Array:
        """See `LossScale.scaled`."""
        return loss * slots[self.name].scale

    def unscaled(self, gradient: T, slots: dict[str, Any]) -> T:
        """See `LossScale.unscaled`."""
        inverse = 1 / slots[self.name].scale
        return jax.tree.map(lambda g: (g * inverse).astype(g.dtype), gradient)

    def init_slot(self) -> ScaleState:
        """See `Judge.init_slot`."""
        return ScaleState(jnp.asarray(self.initial, jnp.float32), jnp.zeros((), jnp.int32))

    def judge(self, slot: ScaleState, signs: Signs) -> Judgement:
        """Never leaves out a step that is finite."""
        good_steps = slot.good_steps + 1
        grows = good_steps >= self.growth_interval
        grown = jnp.where(grows, jnp.minimum(slot.scale * 2, self.largest), slot.scale)
        halved = jnp.maximum(slot.scale / 2, self.smallest)
        after = ScaleState(
            scale=jnp.where(signs.finite, grown, halved),
            good_steps=jnp.where(signs.finite & ~grows, good_steps, 0),
        )
        return Judgement(jnp.asarray(True), after, {"train/loss_scale": slot.scale})
