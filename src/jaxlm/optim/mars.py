"""MARS: AdamW on gradients whose variance is reduced with the gradient of the step before.

Source: Yuan et al. 2024, MARS: Unleashing the Power of Variance Reduction for Training Large Models (arXiv:2411.10438),
algorithm 2 (MARS-AdamW) in its approximate form: the earlier gradient is that of the earlier batch, so that each step
computes one gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxlm.core.field_types import BelowOne, LearningRate, NonNegativeFloat, PositiveFloat
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, chained, clip_by_norm
from jaxlm.optim.clipping import cautious
from jaxlm.reading.choices import choice


@choice(OptimizerConfig, "mars")
class MarsConfig(OptimizerConfig):
    """Corrects the gradient by its change since the last step, clips the global norm of the result, applies AdamW.

    Attributes:
        beta1: decay rate of the first moment (running mean of the corrected gradients).
        beta2: decay rate of the second moment (running mean of their squares).
        gamma: strength of the correction, which is `gamma * beta1 / (1 - beta1)` times the change; 0 is AdamW.
        epsilon: added to the square root of the second moment.
        max_grad_norm: maximum global norm of the corrected gradient; larger ones are scaled down to it. Null disables
            clipping.
        cautious: apply only the elements of an update that point along the gradient's descent, and scale them up for those
            that are left out.
    """

    learning_rate: LearningRate = 3e-3
    beta1: BelowOne = 0.95
    beta2: BelowOne = 0.99
    gamma: NonNegativeFloat = 0.025
    epsilon: NonNegativeFloat = 1e-8
    max_grad_norm: PositiveFloat | None = 1.0
    cautious: bool = False

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        change = add_change(self.gamma * self.beta1 / (1 - self.beta1))
        adam = optax.scale_by_adam(self.beta1, self.beta2, self.epsilon)
        direction = cautious(adam, self.cautious)
        return chained(self, groups, num_steps, change, clip_by_norm(self.max_grad_norm), direction)


class ChangeState(NamedTuple):
    """The gradient of the step before, and whether there was one."""

    is_first: jax.Array
    before: Any


def add_change(factor: float) -> optax.GradientTransformation:
    """Adds `factor` times the change of the gradient since the last update. The first gradient has not changed."""

    def init_fn(params: Any) -> ChangeState:
        return ChangeState(jnp.ones((), jnp.bool_), jax.tree.map(jnp.zeros_like, params))

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, ChangeState]:
        by = jnp.where(state.is_first, 0.0, factor)
        corrected = jax.tree.map(
            lambda now, before: (now + by * (now - before)).astype(now.dtype), updates, state.before
        )
        return corrected, ChangeState(jnp.zeros((), jnp.bool_), updates)

    return optax.GradientTransformation(init_fn, update_fn)
