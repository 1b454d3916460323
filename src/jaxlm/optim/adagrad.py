"""Adagrad: gradients over the root of the sum of their squares so far.

Source: Duchi et al. 2011, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, figure 1 (the
diagonal form), with decoupled weight decay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import optax

from jaxlm.optim.base import OptimizerConfig, ParameterGroup, add_weight_decay, clip_by_norm, times_learning_rate


@OptimizerConfig.register_subclass("adagrad")
@dataclass(frozen=True)
class AdagradConfig(OptimizerConfig):
    """Clip the global norm, divide by the root of all squares so far, add the decay.

    Attributes:
        initial_accumulator_value: what the sums of squares begin with.
        epsilon: added to them before the root is taken.
        max_grad_norm: gradients of a larger global norm are scaled down to it; null never scales.
    """

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7
    max_grad_norm: float | None = 1.0

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        return optax.with_extra_args_support(
            optax.chain(
                clip_by_norm(self.max_grad_norm),
                optax.scale_by_rss(self.initial_accumulator_value, self.epsilon),
                add_weight_decay(self, groups),
                times_learning_rate(self.schedule(num_steps)),
            )
        )
