"""Muon: orthogonalizes the momentum of hidden matrices, and uses Adam for all other parameters.

Source: Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks (kellerjordan.github.io/posts/muon);
Liu et al. 2025, Muon is Scalable for LLM Training (arXiv:2502.16982), section 2.2, for `use_kimi_scaling`; Chen et al. 2025,
Cautious Weight Decay (arXiv:2510.12402), algorithm 1; github.com/karpathy/nanochat for how they go together, and for the
schedules. `jaxlm.optim.orthogonal` names the sources of the rest.

This does not use optax's Muon: optax bias-corrects momentum and gradient separately before it interpolates them, which
changes the direction of the first steps, and it treats the first axis of a matrix as its inputs.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval

from jaxlm.core import tree
from jaxlm.core.field_types import BelowOne, LearningRate, NonNegativeFloat, PositiveFloat, PositiveInt
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, add_weight_decay
from jaxlm.optim.matrices import MatrixView, map_matrices, matrices, replace_matrices, with_adam_fallback
from jaxlm.optim.orthogonal import (
    COEFFICIENTS,
    equal_rows,
    map_sharded_matrices,
    newton_schulz,
    normalize_by_mean_squares,
    orthogonal_norm,
)
from jaxlm.optim.schedules import DecayFactor, MomentumSchedule, ScheduledMomentum, decay_factor
from jaxlm.reading.choices import choice

NormFactor = Annotated[float, Interval(ge=1, le=10)]


@choice(OptimizerConfig, "muon")
class MuonConfig(OptimizerConfig):
    """Clips the global norm, orthogonalizes the momentum of matrices, applies Adam to the rest, adds weight decay.

    Matrices are the weights of linear layers, each expert's weights, LoRA's adapters, and the kernels of Flax modules, except
    those of the vocabulary. Each layer's weight is one matrix, with all heads of a projection together. Both learning rates
    follow the same schedule.

    Attributes:
        learning_rate: peak learning rate of matrices.
        adam_lr: peak learning rate of all other parameters.
        momentum: decay rate of the momentum of matrices.
        nesterov: use Nesterov momentum for matrices.
        momentum_ema: the momentum is a running mean of the gradients, without bias correction, instead of a sum. Directions
            differ from those of a sum only while `momentum_schedule` changes the decay rate.
        momentum_schedule: change the decay rate of the momentum during the phase; null keeps it.
        coefficient_type: polynomials that are applied to the singular values: quintic is the same Newton-Schulz polynomial
            in each iteration; polar_express has another one in each of the first five, which ends closer to 1.
        backend_steps: number of Newton-Schulz iterations.
        norm_factor: a matrix is divided by its Frobenius norm times this. For polar_express, above 1: its polynomials must
            not see a singular value above 1, not even by rounding.
        muon_epsilon: added to the norm of a matrix before dividing by it.
        row_equilibration: scale all rows of a matrix to the same norm before its orthogonalization (MuonEq).
        renormalize: scale each orthogonalized matrix to the norm of an exactly orthogonal one (Muon+).
        normuon_beta2: decay rate of the running mean of squares that NorMuon divides the rows of a tall matrix by, or the
            columns of a wide one. The matrix keeps its Frobenius norm. Null turns NorMuon off.
        orthogonalization_dtype: dtype of the iterations: float32 or bfloat16. Null is float32.
        use_kimi_scaling: scale updates by 0.2 sqrt(max(out, in)) to match the size of Adam's updates, so that learning
            rate and weight decay tuned for Adam can be used. False scales by sqrt(max(1, out / in)).
        scale_weight_decay: scale the weight decay of matrices like their updates, as if the scale were part of the learning
            rate.
        cautious_weight_decay: apply weight decay only to the elements that the update moves towards 0.
        weight_decay_schedule: what the weight decay is multiplied by during the phase, in addition to the learning rate: 1
            (constant), or a factor that falls from 1 to 0 along a line (linear) or half a cosine (cosine).
        beta1, beta2, epsilon: Adam's keys of the same names, used for all other parameters: embeddings, the output head,
            norms and biases.
        max_grad_norm: maximum global gradient norm; larger gradients are scaled down to it. Null disables clipping.
    """

    learning_rate: LearningRate = 0.02
    adam_lr: LearningRate = 6e-4
    momentum: BelowOne = 0.95
    nesterov: bool = True
    momentum_ema: bool = False
    momentum_schedule: MomentumSchedule | None = None
    coefficient_type: Literal["quintic", "polar_express"] = "quintic"
    backend_steps: PositiveInt = 5
    norm_factor: NormFactor = 1.0
    muon_epsilon: NonNegativeFloat = 1e-8
    row_equilibration: bool = False
    renormalize: bool = False
    normuon_beta2: BelowOne | None = None
    orthogonalization_dtype: Literal["float32", "bfloat16"] | None = None
    use_kimi_scaling: bool = False
    scale_weight_decay: bool = False
    cautious_weight_decay: bool = False
    weight_decay_schedule: DecayFactor = "constant"
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    epsilon: NonNegativeFloat = 1e-8
    max_grad_norm: PositiveFloat | None = 1.0

    separates_matrices: ClassVar[bool] = True

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        return with_adam_fallback(
            self,
            groups,
            num_steps,
            ("muon", self._direction(num_steps)),
            optax.scale_by_adam(self.beta1, self.beta2, self.epsilon),
            adam_lr=self.adam_lr,
            max_grad_norm=self.max_grad_norm,
            decay=self._weight_decay(groups, num_steps),
        )

    def _direction(self, num_steps: int) -> optax.GradientTransformation:
        """From the gradients of matrices to their updates, before weight decay and learning rate."""
        steps = [self._momentum(num_steps), self._orthogonal()]
        if self.normuon_beta2 is not None:
            steps.append(normalize_by_mean_squares(self.normuon_beta2))
        unscaled = optax.chain(*steps)

        def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            updates, state = unscaled.update(updates, state, params)
            return map_matrices(lambda matrix: self._scale(*matrix.shape[-2:]) * matrix, updates), state

        return optax.GradientTransformation(unscaled.init, update_fn)

    def _momentum(self, num_steps: int) -> optax.GradientTransformation:
        if self.momentum_schedule is None and not self.momentum_ema:
            return optax.trace(self.momentum, self.nesterov)
        constant = lambda _: jnp.asarray(self.momentum, jnp.float32)  # noqa: E731
        schedule = self.momentum_schedule
        value = constant if schedule is None else schedule.build(self.momentum, self.schedule(num_steps), num_steps)

        def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            decay = value(state.count)
            weight = 1 - decay if self.momentum_ema else 1.0
            mixed = lambda m, g: (decay * m + weight * g).astype(m.dtype)  # noqa: E731
            mean = jax.tree.map(mixed, state.mean, updates)
            ahead = jax.tree.map(mixed, mean, updates) if self.nesterov else mean
            return ahead, ScheduledMomentum(state.count + 1, mean)

        def init_fn(params: Any) -> Any:
            return ScheduledMomentum(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

        return optax.GradientTransformation(init_fn, update_fn)

    def _orthogonal(self) -> optax.GradientTransformation:
        dtype = self.orthogonalization_dtype
        iterate = functools.partial(
            newton_schulz,
            num_steps=self.backend_steps,
            epsilon=self.muon_epsilon,
            coefficients=COEFFICIENTS[self.coefficient_type],
            norm_factor=self.norm_factor,
            dtype=dtype,
        )

        def orthogonalized(updates: Any, _: Any) -> Any:
            views = matrices(map_matrices(equal_rows, updates) if self.row_equilibration else updates)
            # Cast before the matrices move between devices.
            inputs = {path: view if dtype is None else _cast(view, dtype) for path, view in views.items()}
            outputs = map_sharded_matrices(iterate, inputs)
            updates = replace_matrices(updates, {p: outputs[p].astype(v.weight.dtype) for p, v in views.items()})
            return map_matrices(orthogonal_norm, updates) if self.renormalize else updates

        return optax.stateless(orthogonalized)

    def _scale(self, out: int, into: int) -> float:
        return 0.2 * math.sqrt(max(out, into)) if self.use_kimi_scaling else math.sqrt(max(1.0, out / into))

    def _weight_decay(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformation:
        if not (self.cautious_weight_decay or self.scale_weight_decay or self.weight_decay_schedule != "constant"):
            return add_weight_decay(self, groups)
        factor = decay_factor(self.weight_decay_schedule, num_steps)
        decaying = {path for group in groups if group.weight_decay for path in group.paths}
        as_matrices = {path for group in groups if group.as_matrices for path in group.paths}

        def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            rate = self.weight_decay * factor(state.count)
            weights = dict(tree.leaves(params))
            scales = {
                path: self._scale(hax.axis_size(view.outputs), hax.axis_size(view.inputs))
                for path, view in matrices(updates).items()
                if self.scale_weight_decay and path in as_matrices
            }

            def decayed(path: str, update: Any) -> Any:
                if path not in decaying:
                    return update
                pull = weights[path] * (rate * scales.get(path, 1.0))
                pull = pull * (update * weights[path] >= 0) if self.cautious_weight_decay else pull
                return (update + pull).astype(update.dtype)

            return tree.map_leaves(decayed, updates), optax.ScaleByScheduleState(state.count + 1)

        return optax.GradientTransformation(
            lambda params: optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)), update_fn
        )


def _cast(view: MatrixView, dtype: str) -> MatrixView:
    return dataclasses.replace(view, weight=view.weight.astype(dtype))
