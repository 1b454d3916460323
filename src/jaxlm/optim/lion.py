"""Lion: the sign of an interpolation of momentum and gradient.

Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms (arXiv:2302.06675), algorithm 2.
"""

from collections.abc import Sequence

import optax

from jaxlm.core.field_types import BelowOne, PositiveFloat
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, chained, clip_by_norm
from jaxlm.optim.clipping import cautious
from jaxlm.reading.choices import choice


@choice(OptimizerConfig, "lion")
class LionConfig(OptimizerConfig):
    """Clips the global norm, takes the sign, adds weight decay. Use a learning rate 3 to 10 times smaller than for Adam.

    Attributes:
        beta1: weight of the momentum in the interpolation whose sign is taken.
        beta2: decay rate of the momentum.
        max_grad_norm: maximum global gradient norm; larger gradients are scaled down to it. Null disables clipping.
        cautious: apply only the elements of an update that point along the gradient's descent, and scale them up for those
            that are left out.
    """

    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    max_grad_norm: PositiveFloat | None = 1.0
    cautious: bool = False

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        direction = cautious(optax.scale_by_lion(self.beta1, self.beta2), self.cautious)
        return chained(self, groups, num_steps, clip_by_norm(self.max_grad_norm), direction)
