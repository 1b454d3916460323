"""Optimizers that treat every element alike: AdamW, Adagrad, Lion, and MARS, which reduces the gradient's variance.

AdamW divides the running mean of gradients by the root of that of their squares, Adagrad gradients by the root of their
accumulated squares. Lion takes the sign of an interpolation of momentum and gradient. MARS is AdamW on gradients whose
variance is reduced with the gradient of the step before: in the approximate form, which takes that of the earlier batch, so
that each step computes one gradient. Weight decay is decoupled.

Source:
    AdamW: Kingma and Ba 2015, Adam (arXiv:1412.6980), algorithm 1; Loshchilov and Hutter 2019, Decoupled Weight Decay
    Regularization (arXiv:1711.05101), algorithm 2; norm clipping comes first, as in Pascanu et al. 2013 (arXiv:1211.5063).
    Dozat 2016 for `nesterov`; Defazio 2025 (arXiv:2506.02285), algorithm 1, for `adamc_weight_decay`; Liang et al. 2024
    (arXiv:2411.16085), algorithm 1, for `cautious`.
    Adagrad: Duchi et al. 2011, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, figure 1 (the
    diagonal form).
    Lion: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms (arXiv:2302.06675), algorithm 2.
    MARS: Yuan et al. 2024, MARS: Unleashing the Power of Variance Reduction for Training Large Models (arXiv:2411.10438),
    algorithm 2 (MARS-AdamW).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxlm.core.field_types import BelowOne, LearningRate, NonNegativeFloat, PositiveFloat
from jaxlm.core.guards import scaled
from jaxlm.core.rules import Rules, excludes
from jaxlm.optim.base import (
    OptimizerConfig,
    ParameterGroup,
    add_weight_decay,
    chained,
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

    key_rules: ClassVar[Rules] = (excludes("update_rms_clipping", "clip_update_norm"),)

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


@choice(OptimizerConfig, "mars")
class MarsConfig(OptimizerConfig):
    """Corrects the gradient by its change since the last step, clips the global norm of the result, applies AdamW.

    Attributes:
        beta1: decay rate of the first moment (running mean of the corrected gradients).
        beta2: decay rate of the second moment (running mean of their squares).
        gamma: strength of the correction, which is `gamma * beta1 / (1 - beta1)` times the change; 0 is AdamW.
        epsilon: added to the square root of the second moment.
        max_grad_norm: maximum global norm of the corrected gradient; larger ones are scaled down to it. Null disables
            clipping.
        cautious: apply only the elements of an update that point along the gradient's descent, and scale them up for those
            that are left out.
    """

    learning_rate: LearningRate = 3e-3
    beta1: BelowOne = 0.95
    beta2: BelowOne = 0.99
    gamma: NonNegativeFloat = 0.025
    epsilon: NonNegativeFloat = 1e-8
    max_grad_norm: PositiveFloat | None = 1.0
    cautious: bool = False

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        change = add_change(self.gamma * self.beta1 / (1 - self.beta1))
        adam = optax.scale_by_adam(self.beta1, self.beta2, self.epsilon)
        direction = cautious(adam, self.cautious)
        return chained(self, groups, num_steps, change, clip_by_norm(self.max_grad_norm), direction)


class ChangeState(NamedTuple):
    """The gradient of the step before, and whether there was one."""

    is_first: jax.Array
    before: Any


def add_change(factor: float) -> optax.GradientTransformation:
    """Adds `factor` times the change of the gradient since the last update. The first gradient has not changed."""

    def init_fn(params: Any) -> ChangeState:
        return ChangeState(jnp.ones((), jnp.bool_), jax.tree.map(jnp.zeros_like, params))

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, ChangeState]:
        by = jnp.where(state.is_first, 0.0, factor)
        corrected = jax.tree.map(
            lambda now, before: (now + by * (now - before)).astype(now.dtype), updates, state.before
        )
        return corrected, ChangeState(jnp.zeros((), jnp.bool_), updates)

    return optax.GradientTransformation(init_fn, update_fn)
