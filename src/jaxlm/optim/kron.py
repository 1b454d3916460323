"""PSGD Kron: whitens the momentum of hidden matrices from both sides, and uses Adam for all other parameters.

Source: Li 2015, Preconditioned Stochastic Gradient Descent (arXiv:1512.04202), and github.com/lixilinx/psgd_torch, which
whitens the momentum with Kronecker products. `jaxlm.optim.preconditioner` lists the differences.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import NamedArray

from jaxlm.core.field_types import (
    BelowOne,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
)
from jaxlm.optim.base import OptimizerConfig, ParameterGroup
from jaxlm.optim.clipping import clip_by_rms
from jaxlm.optim.matrices import MatrixView, matrices, replace_matrices, with_adam_fallback
from jaxlm.optim.preconditioner import Factor, initial_factor, precondition
from jaxlm.reading.choices import choice


@choice(OptimizerConfig, "kron")
class KronConfig(OptimizerConfig):
    """Clips the global norm, whitens the momentum of matrices, applies Adam to the rest, adds weight decay.

    Matrices are the same parameters as for Muon. Each layer's weight is one matrix, with all heads of a projection together.
    The whitened momentum of an m x n matrix has entries of about 1, compared with 0.2 to 0.4 for Adam, so use a smaller
    learning rate than for Adam. The state per matrix is the momentum plus m^2 + n^2 elements. Both learning rates follow the
    same schedule.

    Attributes:
        learning_rate: peak learning rate of matrices.
        adam_lr: peak learning rate of all other parameters.
        beta1: decay rate of the running mean of gradients, for matrices and for Adam.
        preconditioner_lr: step size of the preconditioner update; above 0 and at most 1.
        preconditioner_init_scale: initial scale of the preconditioner. It multiplies the momentum of the first step.
        max_dense_size: sides of a matrix that are longer than this get a diagonal factor instead of a dense one.
        damping: standard deviation of the noise that gradients are assumed to contain. It limits the amplification of
            small gradients.
        update_rms_clipping: maximum root mean square of each parameter's whitened momentum in each layer; larger ones are
            scaled down to it. Null disables clipping.
        beta2, epsilon: Adam's keys of the same names, used for all other parameters: embeddings, the output head, norms
            and biases.
        max_grad_norm: maximum global gradient norm; larger gradients are scaled down to it. Null disables clipping.
    """

    learning_rate: LearningRate = 3e-4
    adam_lr: LearningRate = 6e-4
    beta1: BelowOne = 0.9
    preconditioner_lr: PositiveFraction = 0.1
    preconditioner_init_scale: PositiveFloat = 1.0
    max_dense_size: NonNegativeInt = 8192
    damping: NonNegativeFloat = 1e-9
    update_rms_clipping: PositiveFloat | None = 1.1
    beta2: BelowOne = 0.95
    epsilon: NonNegativeFloat = 1e-8
    max_grad_norm: PositiveFloat | None = 1.0

    separates_matrices: ClassVar[bool] = True

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        clip = [] if self.update_rms_clipping is None else [clip_by_rms(self.update_rms_clipping)]
        direction = optax.chain(self._whitened(), *clip)
        return with_adam_fallback(
            self,
            groups,
            num_steps,
            ("kron", direction),
            optax.scale_by_adam(self.beta1, self.beta2, self.epsilon),
            adam_lr=self.adam_lr,
            max_grad_norm=self.max_grad_norm,
        )

    def _whitened(self) -> optax.GradientTransformation:
        def init_fn(params: Any) -> Any:
            memories = {path: self._first(view) for path, view in matrices(params).items()}
            return _State(jnp.zeros((), jnp.int32), memories)

        def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            count, directions, memories = state.count + 1, {}, {}
            for path, view in matrices(updates).items():
                directions[path], memories[path] = self._step(view, state.memories[path], count)
            return replace_matrices(updates, directions), _State(count, memories)

        return optax.GradientTransformation(init_fn, update_fn)

    def _first(self, view: MatrixView) -> "_Memory":
        scale = self.preconditioner_init_scale**0.5  # half for each of the two sides
        sides = (initial_factor(view.stacked, side, scale, self.max_dense_size) for side in (view.outputs, view.inputs))
        return _Memory(hax.zeros(view.weight.axes, jnp.float32), *sides)

    def _step(self, view: MatrixView, memory: "_Memory", count: jax.Array) -> tuple[NamedArray, "_Memory"]:
        """The whitened momentum of all matrices in one weight, and their new state. `count` includes this step."""
        mean = self.beta1 * memory.mean + (1 - self.beta1) * view.weight.astype(jnp.float32)
        unbiased = view.of(mean) / (1 - self.beta1**count)
        white, left, right = precondition(
            unbiased, memory.left, memory.right, rate=self.preconditioner_lr, damping=self.damping
        )
        return view.named(white).astype(view.weight.dtype), _Memory(mean, left, right)


class _Memory(NamedTuple):
    """State of a matrix: the running mean of its gradients, and the factors that whiten its rows and its columns."""

    mean: NamedArray
    left: Factor
    right: Factor


class _State(NamedTuple):
    count: jax.Array
    memories: dict[str, _Memory]
