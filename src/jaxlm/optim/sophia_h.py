"""Sophia-H: momentum over an estimate of the Hessian's diagonal, clipped number by number.

Source: Liu et al. 2023, Sophia: A Scalable Stochastic Second-order Optimizer for Language Model Pre-training
(arXiv:2305.14342), algorithms 1 (Hutchinson's estimate) and 3; the gradient's norm is clipped first, as in its section
3.1. Not optax's (`optax.contrib.sophia`): there an estimate comes into effect one step after it is made, so that the first
steps know of none, the momentum is corrected for bias, and directions are signs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from jaxlm.core.errors import ConfigError
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, add_weight_decay, clip_by_norm, times_learning_rate
from jaxlm.optim.curvature import Curvature


class SophiaState(eqx.Module):
    """What is remembered between steps.

    Attributes:
        count: int32, updates so far.
        mean: of the gradients, running.
        diagonal: of the Hessian, running; 0 before the first estimate.
    """

    count: jax.Array
    mean: Any
    diagonal: Any


@OptimizerConfig.register_subclass("sophia-h")
@dataclass(frozen=True)
class SophiaHConfig(OptimizerConfig):
    """Clip the global norm, divide the momentum by the curvature, clip each number, add the decay.

    Every `update_interval`-th step also estimates the curvature, on its first micro-batch: about three gradients of it
    more, and two to three times its temporary memory. Kernels are plain attention and loss there, in float32 where the
    rest computes in float16. Numbers whose curvature is not above 0 move by the clip, whatever their gradient's size.
    An estimate that is not finite is left out.

    Attributes:
        beta1: decay of the gradient's running mean.
        beta2: decay of the running mean of the estimates.
        gamma: curvature is multiplied by it; the larger, the fewer numbers are clipped (half to nine tenths should be).
        epsilon: the least that is divided by.
        clip_threshold: the largest update of a number, before the learning rate.
        update_interval: steps from one estimate to the next.
        rng_seed: of the directions along which the curvature is measured, together with the run's own seed.
        max_grad_norm: gradients of a larger global norm are scaled down to it; null never scales.
    """

    beta1: float = 0.96
    beta2: float = 0.99
    gamma: float = 0.01
    epsilon: float = 1e-12
    clip_threshold: float = 1.0
    update_interval: int = 10
    rng_seed: int = 0
    max_grad_norm: float | None = 1.0

    def __post_init__(self):
        for name in ("gamma", "epsilon", "clip_threshold", "update_interval"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"optimizer.{name}: {getattr(self, name)} given, more than 0 expected")

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        direction: Any = self._direction  # optax's type leaves no room for an argument of one's own
        return optax.with_extra_args_support(
            optax.chain(
                clip_by_norm(self.max_grad_norm),
                optax.GradientTransformationExtraArgs(_first_state, direction),
                add_weight_decay(self, groups),
                times_learning_rate(self.schedule(num_steps)),
            )
        )

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
    return jax.tree.map(lambda m, x: (beta * m + (1 - beta) * x).astype(m.dtype), mean, new)
