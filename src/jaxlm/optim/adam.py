"""AdamW.

Source: Kingma and Ba 2015, Adam (arXiv:1412.6980), algorithm 1; Loshchilov and Hutter 2019, Decoupled Weight Decay
Regularization (arXiv:1711.05101), algorithm 2; norm clipping comes first, as in Pascanu et al. 2013 (arXiv:1211.5063).
Dozat 2016 for `nesterov`; Defazio 2025 (arXiv:2506.02285), algorithm 1, for `adamc_weight_decay`; Liang et al. 2024
(arXiv:2411.16085), algorithm 1, for `cautious`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import BelowOne, NonNegativeFloat, PositiveFloat
from jaxlm.core.guards import scaled
from jaxlm.optim.base import (
    OptimizerConfig,
    ParameterGroup,
    add_weight_decay,
    clip_by_norm,
    decay_mask,
    scale_by_learning_rate,
)
from jaxlm.optim.clipping import ClipUpdateNorm, cautious, clip_by_rms
from jaxlm.reading.choices import choice


@choice(OptimizerConfig, "adam")
class AdamConfig(OptimizerConfig):
    """Clips the global norm, applies Adam, adds weight decay, optionally clips the update, scales by the learning rate.

    Attributes:
        beta1: decay rate of the first moment (running mean of the gradients).
        beta2: decay rate of the second moment (running mean of the squared gradients).
        epsilon: added to the square root of the second moment.
        max_grad_norm: maximum global gradient norm; larger gradients are scaled down to it. Null disables clipping.
        nesterov: use Nesterov momentum.
        update_rms_clipping: maximum root mean square of each parameter's update in each layer, before the learning rate;
            larger updates are scaled down to it. Null disables clipping.
        clip_update_norm: clip updates whose norm is unusually large compared with recent steps; null disables clipping.
        adamc_weight_decay: use AdamC weight decay: multiply the decay by the learning rate divided by its peak once more,
            which keeps the ratio of gradient norm to weight norm constant while the learning rate decays.
        cautious: apply only the elements of an update that point along the gradient's descent, and scale them up for those
            that are left out.
    """

    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    epsilon: NonNegativeFloat = 1e-8
    max_grad_norm: PositiveFloat | None = 1.0
    nesterov: bool = False
    update_rms_clipping: PositiveFloat | None = None
    clip_update_norm: ClipUpdateNorm | None = None
    adamc_weight_decay: bool = False
    cautious: bool = False

    def __post_init__(self):
        if self.update_rms_clipping is not None and self.clip_update_norm is not None:
            raise ConfigError("optimizer: update_rms_clipping and clip_update_norm are both set. Remove one")

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        clip_update = [] if self.update_rms_clipping is None else [clip_by_rms(self.update_rms_clipping)]
        clip_update += [] if self.clip_update_norm is None else [self.clip_update_norm.build()]
        direction = optax.scale_by_adam(self.beta1, self.beta2, self.epsilon, nesterov=self.nesterov)
        return optax.with_extra_args_support(
            optax.chain(
                clip_by_norm(self.max_grad_norm),
                cautious(direction, self.cautious),
                self._decay(groups, num_steps),
                *clip_update,
                scale_by_learning_rate(self.schedule(num_steps)),
            )
        )

    def _decay(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformation:
        if not self.adamc_weight_decay:
            return add_weight_decay(self, groups)
        schedule, mask = self.schedule(num_steps), decay_mask(groups)

        def update_fn(
            updates: Any, state: Any, params: Any = None, *, controls: Mapping[str, jax.Array] | None = None, **_: Any
        ) -> Any:
            rate = self.weight_decay * scaled(schedule(state.count), controls or {}) / self.learning_rate
            decayed = jax.tree.map(lambda decays, u, p: u + rate * p if decays else u, mask(params), updates, params)
            return decayed, optax.ScaleByScheduleState(state.count + 1)

        init_fn = lambda params: optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))  # noqa: E731
        return optax.GradientTransformationExtraArgs(init_fn, update_fn)
