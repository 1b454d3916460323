"""Lion: the sign of a mixture of momentum and gradient.

Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms (arXiv:2302.06675), algorithm 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import optax

from jaxlm.optim.base import OptimizerConfig, ParameterGroup, add_weight_decay, clip_by_norm, times_learning_rate


@OptimizerConfig.register_subclass("lion")
@dataclass(frozen=True)
class LionConfig(OptimizerConfig):
    """Clip the global norm, take the sign, add the decay. Wants a learning rate some 3 to 10 times smaller than Adam's.

    Attributes:
        beta1: share of the momentum in the mixture whose sign is taken.
        beta2: decay of the momentum.
        max_grad_norm: gradients of a larger global norm are scaled down to it; null never scales.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float | None = 1.0

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        return optax.with_extra_args_support(
            optax.chain(
                clip_by_norm(self.max_grad_norm),
                optax.scale_by_lion(self.beta1, self.beta2),
                add_weight_decay(self, groups),
                times_learning_rate(self.schedule(num_steps)),
            )
        )
