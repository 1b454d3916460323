"""AdamW.

Source: Kingma and Ba 2015, Adam (arXiv:1412.6980), algorithm 1; Loshchilov and Hutter 2019, Decoupled Weight Decay
Regularization (arXiv:1711.05101), algorithm 2; the norm is clipped first, as in Pascanu et al. 2013 (arXiv:1211.5063).
Dozat 2016 for `nesterov`; Defazio 2025 (arXiv:2506.02285), algorithm 1, for `adamc_weight_decay`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxlm.core.errors import ConfigError
from jaxlm.optim.base import (
    OptimizerConfig,
    ParameterGroup,
    add_weight_decay,
    clip_by_norm,
    decay_mask,
    times_learning_rate,
)
from jaxlm.optim.clipping import ClipUpdateNorm, clip_by_rms


@OptimizerConfig.register_subclass("adam")
@dataclass(frozen=True)
class AdamConfig(OptimizerConfig):
    """Clip the global norm, Adam, add the decay, perhaps clip the update, multiply by minus the learning rate.

    Attributes:
        beta1: decay of the gradient's running mean.
        beta2: decay of the squared gradient's running mean.
        epsilon: added to the root of the latter.
        max_grad_norm: gradients of a larger global norm are scaled down to it; null never scales.
        nesterov: look one step ahead along the running mean.
        update_rms_clipping: updates, before the learning rate, of a larger root mean square are scaled down to it,
            parameter by parameter and layer by layer; null never scales.
        clip_update_norm: scale updates down that are implausibly large beside the last ones.
        adamc_weight_decay: multiply the decay by the learning rate over its peak once more, so that weights and
            gradients stay in proportion while the learning rate falls.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0
    nesterov: bool = False
    update_rms_clipping: float | None = None
    clip_update_norm: ClipUpdateNorm | None = None
    adamc_weight_decay: bool = False

    def __post_init__(self):
        if self.update_rms_clipping is not None and self.clip_update_norm is not None:
            raise ConfigError("optimizer: update_rms_clipping and clip_update_norm are both given. Leave one out")

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        clip_update = [] if self.update_rms_clipping is None else [clip_by_rms(self.update_rms_clipping)]
        clip_update += [] if self.clip_update_norm is None else [self.clip_update_norm.build()]
        return optax.with_extra_args_support(
            optax.chain(
                clip_by_norm(self.max_grad_norm),
                optax.scale_by_adam(self.beta1, self.beta2, self.epsilon, nesterov=self.nesterov),
                self._decay(groups, num_steps),
                *clip_update,
                times_learning_rate(self.schedule(num_steps)),
            )
        )

    def _decay(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformation:
        if not self.adamc_weight_decay:
            return add_weight_decay(self, groups)
        schedule, mask = self.schedule(num_steps), decay_mask(groups)

        def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
            rate = self.weight_decay * schedule(state.count) / self.learning_rate
            decayed = jax.tree.map(lambda decays, u, p: u + rate * p if decays else u, mask(params), updates, params)
            return decayed, optax.ScaleByScheduleState(state.count + 1)

        def init_fn(params: Any) -> Any:
            return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

        return optax.GradientTransformation(init_fn, update_fn)
