"""Adagrad: gradients divided by the root of their accumulated squares.

Source: Duchi et al. 2011, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, figure 1 (the
diagonal form), with decoupled weight decay.
"""

from collections.abc import Sequence

import optax

from jaxlm.core.field_types import NonNegativeFloat, PositiveFloat
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, chained, clip_by_norm
from jaxlm.reading.choices import choice


@choice(OptimizerConfig, "adagrad")
class AdagradConfig(OptimizerConfig):
    """Clips the global norm, divides by the root of the accumulated squares, adds weight decay.

    Attributes:
        initial_accumulator_value: initial value of the sums of squared gradients.
        epsilon: added to the sums of squares before the square root.
        max_grad_norm: maximum global gradient norm; larger gradients are scaled down to it. Null disables clipping.
    """

    initial_accumulator_value: NonNegativeFloat = 0.1
    epsilon: NonNegativeFloat = 1e-7
    max_grad_norm: PositiveFloat | None = 1.0

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        direction = optax.scale_by_rss(self.initial_accumulator_value, self.epsilon)
        return chained(self, groups, num_steps, clip_by_norm(self.max_grad_norm), direction)
