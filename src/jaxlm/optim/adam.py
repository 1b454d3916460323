"""AdamW.

Source: Kingma and Ba 2015, Adam (arXiv:1412.6980), algorithm 1; Loshchilov and Hutter 2019, Decoupled Weight Decay
Regularization (arXiv:1711.05101), algorithm 2; the norm is clipped first, as in Pascanu et al. 2013 (arXiv:1211.5063).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import optax

from jaxlm.optim.base import OptimizerConfig, ParameterGroup, decay_mask


@OptimizerConfig.register_subclass("adam")
@dataclass(frozen=True)
class AdamConfig(OptimizerConfig):
    """Clip the global norm, Adam, add the decay, multiply by minus the learning rate.

    Attributes:
        beta1: decay of the gradient's running mean.
        beta2: decay of the squared gradient's running mean.
        epsilon: added to the root of the latter.
        max_grad_norm: gradients of a larger global norm are scaled down to it; null never scales.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        """See `OptimizerConfig.build`."""
        clip = optax.identity() if self.max_grad_norm is None else optax.clip_by_global_norm(self.max_grad_norm)
        return optax.with_extra_args_support(
            optax.chain(
                clip,
                optax.scale_by_adam(self.beta1, self.beta2, self.epsilon),
                optax.add_decayed_weights(self.weight_decay, decay_mask(groups)),
                optax.scale_by_learning_rate(self.schedule(num_steps)),  # pyright: ignore[reportArgumentType]
            )
        )
