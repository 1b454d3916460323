"""Sophia-H: momentum divided by an estimate of the Hessian's diagonal, clipped elementwise.

Source: Liu et al. 2023, Sophia: A Scalable Stochastic Second-order Optimizer for Language Model Pre-training
(arXiv:2305.14342), algorithms 1 (Hutchinson's estimate) and 3; the gradient's norm is clipped first, as in its section
3.1. This does not use `optax.contrib.sophia`: there an estimate takes effect one step late, so the first steps have none,
the momentum is bias-corrected, and directions are signs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from jaxlm.core.field_types import BelowOne, PositiveFloat, PositiveInt, Seed
from jaxlm.core.guards import OptimizerFacts
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, chained, clip_by_norm
from jaxlm.optim.curvature import Curvature
from jaxlm.reading.choices import choice


class SophiaState(eqx.Module):
    """State of Sophia-H.

    Attributes:
        count: int32, number of updates so far.
        mean: running mean of the gradients.
        diagonal: running mean of the estimates of the Hessian's diagonal; 0 before the first estimate.
    """

    count: jax.Array
    mean: Any
    diagonal: Any


@choice(OptimizerConfig, "sophia-h")
class SophiaHConfig(OptimizerConfig):
    """Clips the global norm, divides the momentum by the curvature, clips elementwise, adds weight decay.

    Every `update_interval`-th step also estimates the curvature on its first microbatch. This costs about three more
    gradients of the microbatch and two to three times its temporary memory. The estimate uses the reference attention and
    loss instead of fused kernels, and float32 if the run computes in float16. Elements whose curvature is not positive move
    by the clip threshold, regardless of their gradient. Non-finite estimates are skipped.

    Attributes:
        beta1: decay rate of the running mean of the gradients.
        beta2: decay rate of the running mean of the curvature estimates.
        gamma: multiplier of the curvature. A larger value clips fewer elements; aim for 50% to 90% clipped.
        epsilon: minimum divisor.
        clip_threshold: maximum absolute update of an element, before the learning rate.
        update_interval: steps between curvature estimates.
        rng_seed: seed of the random directions of the estimates; combined with the run's seed.
        max_grad_norm: maximum global gradient norm; larger gradients are scaled down to it. Null disables clipping.
    """

    beta1: BelowOne = 0.96
    beta2: BelowOne = 0.99
    gamma: PositiveFloat = 0.01
    epsilon: PositiveFloat = 1e-12
    clip_threshold: PositiveFloat = 1.0
    update_interval: PositiveInt = 10
    rng_seed: Seed = 0
    max_grad_norm: PositiveFloat | None = 1.0

    @property
    def facts(self) -> OptimizerFacts:
        return dataclasses.replace(super().facts, second_derivatives=True)

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        update: Any = self._direction  # optax's type does not allow additional named arguments
        direction = optax.GradientTransformationExtraArgs(_first_state, update)
        return chained(self, groups, num_steps, clip_by_norm(self.max_grad_norm), direction)

    def _direction(
        self, updates: Any, state: SophiaState, params: Any = None, *, curvature: Curvature, **_: Any
    ) -> tuple[Any, SophiaState]:
        mean = _mixed(self.beta1, state.mean, updates)
        diagonal = jax.lax.cond(
            state.count % self.update_interval == 0,
            lambda: self._with_estimate(state.diagonal, curvature.diagonal(params, self.rng_seed)),
            lambda: state.diagonal,
        )

        def direction(m: jax.Array, h: jax.Array) -> jax.Array:
            return jnp.clip(m / jnp.maximum(self.gamma * h, self.epsilon), -self.clip_threshold, self.clip_threshold)

        return jax.tree.map(direction, mean, diagonal), SophiaState(state.count + 1, mean, diagonal)

    def _with_estimate(self, diagonal: Any, estimate: Any) -> Any:
        finite = jnp.isfinite(optax.global_norm(estimate))
        mixed = _mixed(self.beta2, diagonal, estimate)
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), mixed, diagonal)


def _first_state(params: Any) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return SophiaState(jnp.zeros((), jnp.int32), zeros, zeros)


def _mixed(beta: float, mean: Any, new: Any) -> Any:
    return jax.tree.map(lambda m, x: beta * m + (1 - beta) * x, mean, new)
