"""Sign descent."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from jaxlm.optim.base import OptimizerConfig, ParameterGroup


@OptimizerConfig.register_subclass("acme_sign")
@dataclass(frozen=True)
class SignConfig(OptimizerConfig):
    """Steps of equal size in the direction of the gradient's signs.

    Attributes:
        damping: every step is divided by 1 + this.
    """

    damping: float = 0.0

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        stats = optax.stateless(lambda updates, _: jax.tree.map(lambda g: jnp.sign(g) / (1 + self.damping), updates))
        return optax.with_extra_args_support(
            optax.chain(stats, optax.scale_by_learning_rate(self.schedule(num_steps)))  # pyright: ignore
        )
