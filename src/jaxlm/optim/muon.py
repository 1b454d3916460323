"""Muon: orthogonalizes the momentum of hidden matrices, and uses Adam for all other parameters.

Source: Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks (kellerjordan.github.io/posts/muon);
Liu et al. 2025, Muon is Scalable for LLM Training (arXiv:2502.16982), section 2.2, for `use_kimi_scaling`. This does not
use optax's Muon: optax bias-corrects momentum and gradient separately before it interpolates them, which changes the
direction of the first steps, and it treats the first axis of a matrix as its inputs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval

from jaxlm.core.field_types import BelowOne, LearningRate, NonNegativeFloat, PositiveFloat, PositiveInt
from jaxlm.optim.base import OptimizerConfig, ParameterGroup
from jaxlm.optim.lr.momentum import MomentumSchedule
from jaxlm.optim.matrices import map_matrices, with_adam_fallback

NormFactor = Annotated[float, Interval(ge=1, le=10)]
# Coefficients of the odd quintic that each iteration applies to the singular values: steep at 0, near 1 elsewhere.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@OptimizerConfig.register_subclass("muon")
@dataclass(frozen=True)
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
        orthogonalization_dtype: dtype of the iterations: float32 or bfloat16. Null is the dtype of the parameters.
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
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    epsilon: NonNegativeFloat = 1e-8
    max_grad_norm: PositiveFloat | None = 1.0

    separates_matrices: ClassVar[bool] = True

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        direction = optax.chain(optax.trace(self.momentum, self.nesterov), self._orthogonal())
        return with_adam_fallback(
            self,
            groups,
            num_steps,
            ("muon", direction),
            optax.scale_by_adam(self.beta1, self.beta2, self.epsilon),
            adam_lr=self.adam_lr,
            max_grad_norm=self.max_grad_norm,
        )

    def _orthogonal(self) -> optax.GradientTransformation:
        def direction(matrix: jax.Array) -> jax.Array:
            out, into = matrix.shape[-2:]
            size = 0.2 * math.sqrt(max(out, into)) if self.use_kimi_scaling else math.sqrt(max(1.0, out / into))
            return size * newton_schulz(matrix, self.backend_steps, self.muon_epsilon)

        return optax.stateless(lambda updates, _: map_matrices(direction, updates))


def newton_schulz(matrix: jax.Array, num_steps: int, epsilon: float) -> jax.Array:
    """Approximately orthogonalizes each matrix of [.., rows, columns]; its singular vectors do not change.

    Singular values end between about 0.7 and 1.2, not at 1: the steep polynomial trades accuracy for few iterations.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix  # use the smaller of the two Gram matrices
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + epsilon)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
