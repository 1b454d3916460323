"""Sophia-H: momentum over a running estimate of the Hessian's diagonal, clipped number by number.

Source: Liu et al. 2023, Sophia (arXiv:2305.14342), algorithm 3 with the estimator of algorithm 1 (Hutchinson 1989). The
random vector has signs in place of normal numbers: as unbiased, of smaller variance, and exact where the Hessian is
diagonal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxlm.core.errors import ConfigError
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, add_weight_decay, clip_by_norm, times_learning_rate

_SEED = 0x50F1A


@OptimizerConfig.register_subclass("sophia-h")
@dataclass(frozen=True)
class SophiaHConfig(OptimizerConfig):
    """Momentum over the diagonal of the Hessian, at most `clip_threshold`; add the decay.

    Estimating the Hessian differentiates the gradient once more, on the whole batch, every `update_interval` steps, so
    it needs an attention that can be differentiated twice: `model.attn_backend: plain`.

    Attributes:
        beta1: decay of the gradient's running mean.
        beta2: decay of the Hessian's, once every `update_interval` steps.
        epsilon: the least that is divided by.
        gamma: what the Hessian is multiplied by.
        clip_threshold: the largest step of a number, before the learning rate; null never clips.
        update_interval: steps between two estimates.
        max_grad_norm: gradients of a larger global norm are scaled down to it; null never scales.
    """

    beta1: float = 0.96
    beta2: float = 0.99
    epsilon: float = 1e-12
    gamma: float = 0.01
    clip_threshold: float | None = 1.0
    update_interval: int = 10
    max_grad_norm: float | None = None

    def __post_init__(self):
        if self.update_interval < 1:
            raise ConfigError(f"optimizer.update_interval: {self.update_interval} given, 1 and more expected")

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        """See `OptimizerConfig.build`."""
        return optax.with_extra_args_support(
            optax.chain(
                clip_by_norm(self.max_grad_norm),
                self._direction(),
                add_weight_decay(self, groups),
                times_learning_rate(self.schedule(num_steps)),
            )
        )

    def _direction(self) -> optax.GradientTransformationExtraArgs:
        def init_fn(params: Any) -> Any:
            zeros = jax.tree.map(jnp.zeros_like, params)
            return SophiaState(jnp.zeros((), jnp.int32), zeros, zeros)

        def update_fn(updates: Any, state: Any, params: Any = None, *, gradient_of: Callable[[Any], Any], **_: Any):
            count = state.count + 1
            mean = optax.tree.update_moment(updates, state.mean, self.beta1, 1)
            unbiased = optax.tree.bias_correction(mean, self.beta1, count)
            # As published: a step divides by what was known before it, so the very first ones are all clipped.
            direction = jax.tree.map(
                lambda m, h: m / jnp.maximum(self.gamma * h, self.epsilon), unbiased, state.hessian
            )
            most = self.clip_threshold
            if most is not None:
                direction = jax.tree.map(lambda d: jnp.clip(d, -most, most), direction)

            def newly_estimated() -> Any:
                estimate = hessian_diagonal(gradient_of, params, jax.random.fold_in(jax.random.PRNGKey(_SEED), count))
                return optax.tree.update_moment(estimate, state.hessian, self.beta2, 1)

            due = state.count % self.update_interval == 0
            hessian = jax.lax.cond(due, newly_estimated, lambda: state.hessian)
            return direction, SophiaState(count, mean, hessian)

        return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


class SophiaState(NamedTuple):
    """What Sophia remembers.

    Attributes:
        count: int32, updates done.
        mean: running mean of the gradient.
        hessian: running mean of the estimates of the Hessian's diagonal.
    """

    count: jax.Array
    mean: Any
    hessian: Any


def hessian_diagonal(gradient_of: Callable[[Any], Any], params: Any, key: jax.Array) -> Any:
    """An estimate of the diagonal of the Hessian at `params`: u * (H u) for random signs u.

    Args:
        gradient_of: the objective's gradient as a function of the parameters.
    """
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    signs = [jax.random.rademacher(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    signs = jax.tree.unflatten(structure, signs)
    _, product = jax.jvp(gradient_of, (params,), (signs,))
    return jax.tree.map(jnp.multiply, signs, product)
