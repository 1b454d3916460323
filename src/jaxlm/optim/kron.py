"""PSGD Kron: whitens the momentum of hidden matrices from both sides, and uses Adam for all other parameters.

The square of a factor Q multiplies one side of a matrix (`Factor`), and Q is fitted without inverses. The step of Q is the
variant QUAD of github.com/lixilinx/psgd_torch: Q <- (1 - E) Q (1 - E), which keeps Q symmetric and positive with products
alone.

Two differences make the result deterministic and equal on every mesh. The damping noise is integrated out instead of
sampled. The spectral norm is bounded from below by two Frobenius norms, without an argmax that could differ between meshes.

Source: Li 2015, Preconditioned Stochastic Gradient Descent (arXiv:1512.04202), for the criterion tr(P g g') + tr(P^-1),
which is smallest when the whitened P g has uncorrelated entries of variance 1; Li 2024 (arXiv:2402.11858) for fitting Q in
a group; github.com/lixilinx/psgd_torch, which whitens the momentum with Kronecker products.
"""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray

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
from jaxlm.optim.matrices import MatrixView, matrices, replace_matrices, square_axes, with_adam_fallback
from jaxlm.reading.choices import choice

_SMOOTHING = 0.9  # for the steepness, which rises immediately and falls slowly
_TINY = 1e-30  # minimum divisor of a norm


class Factor(eqx.Module):
    """The factor Q for a side of m rows. Q is symmetric and positive definite; Q^2 multiplies the side.

    Attributes:
        root: Q, with axes {stacked .., the side's axes .., basis}; without `basis` if it is diagonal.
        steepness: [..], bound on the curvature of the criterion near Q. The step size is divided by it.
    """

    root: NamedArray
    steepness: jax.Array

    @abc.abstractmethod
    def apply(self, matrix: jax.Array) -> jax.Array:
        """Q^2 @ matrix, for a matrix [.., m, n]."""

    @abc.abstractmethod
    def gain(self) -> jax.Array:
        """[..], squared Frobenius norm of Q^2: the factor by which it amplifies the variance of white noise in a column."""

    @abc.abstractmethod
    def fitted(self, white: jax.Array, noise: jax.Array, rate: float) -> "Factor":
        """One step towards uncorrelated rows of squared length n.

        Args:
            white: [.., m, n], the matrix multiplied by the squares of both factors.
            noise: [..], variance of the noise summed over n columns, multiplied by the square of the other factor only.
            rate: step size, at most 1.
        """

    @abc.abstractmethod
    def scaled(self, by: jax.Array) -> "Factor":
        """Q multiplied by `by` [..]."""

    def largest(self) -> jax.Array:
        """[..], the largest element of Q, which for a symmetric positive definite matrix is on the diagonal."""
        return jnp.max(self.root.array.reshape((*self.steepness.shape, -1)), -1)

    def _named(self, flat: jax.Array) -> NamedArray:
        return hax.named(flat.reshape(self.root.array.shape), self.root.axes)


class DenseFactor(Factor):
    """A factor with all m x m elements."""

    def apply(self, matrix: jax.Array) -> jax.Array:
        return self._square() @ matrix

    def gain(self) -> jax.Array:
        return jnp.sum(jnp.square(self._square()), (-2, -1))

    def fitted(self, white: jax.Array, noise: jax.Array, rate: float) -> "DenseFactor":
        root, square, expected = self._flat(), self._square(), white.shape[-1]
        covariance = white @ white.mT + noise[..., None, None] * (square @ square)
        steepness = _smoothed(self.steepness, _spectral_norm(covariance) + expected)
        size = (0.5 * rate / steepness)[..., None, None]
        half = root - size * (covariance @ root - expected * root)
        whole = half - size * (half @ covariance - expected * half)
        return DenseFactor(self._named(0.5 * (whole + whole.mT)), steepness)

    def scaled(self, by: jax.Array) -> "DenseFactor":
        return DenseFactor(self._named(self._flat() * by[..., None, None]), self.steepness)

    def _flat(self) -> jax.Array:
        return self.root.array.reshape((*self.steepness.shape, -1, self.root.axes[-1].size))

    def _square(self) -> jax.Array:
        return self._flat() @ self._flat()


class DiagonalFactor(Factor):
    """A diagonal factor, for sides that are too long for a dense one."""

    def apply(self, matrix: jax.Array) -> jax.Array:
        return jnp.square(self._flat())[..., None] * matrix

    def gain(self) -> jax.Array:
        return jnp.sum(self._flat() ** 4, -1)

    def fitted(self, white: jax.Array, noise: jax.Array, rate: float) -> "DiagonalFactor":
        root, expected = self._flat(), white.shape[-1]
        variance = jnp.sum(jnp.square(white), -1) + noise[..., None] * root**4
        steepness = _smoothed(self.steepness, jnp.max(variance, -1) + expected)
        size = (0.5 * rate / steepness)[..., None]
        return DiagonalFactor(self._named(root * jnp.square(1 - size * (variance - expected))), steepness)

    def scaled(self, by: jax.Array) -> "DiagonalFactor":
        return DiagonalFactor(self._named(self._flat() * by[..., None]), self.steepness)

    def _flat(self) -> jax.Array:
        return self.root.array.reshape((*self.steepness.shape, -1))


def initial_factor(stacked: tuple[Axis, ...], side: tuple[Axis, ...], scale: float, max_dense_size: int) -> Factor:
    """`scale` times the identity, for one side of each stacked matrix. It is diagonal if the side is too long."""
    steepness = jnp.zeros([axis.size for axis in stacked], jnp.float32)
    size = hax.axis_size(side)
    if size > max_dense_size:
        return DiagonalFactor(hax.full((*stacked, *side), scale, jnp.float32), steepness)
    axes = square_axes(stacked, side)
    identity = jnp.broadcast_to(scale * jnp.eye(size, dtype=jnp.float32), (*steepness.shape, size, size))
    return DenseFactor(hax.named(identity.reshape([axis.size for axis in axes]), axes), steepness)


def precondition(
    matrix: jax.Array, left: Factor, right: Factor, *, rate: float, damping: float
) -> tuple[jax.Array, Factor, Factor]:
    """Whitens a matrix [.., m, n] with both factors, and returns it with the factors after fitting them to it by one step.

    Args:
        rate: step size of the fit, at most 1.
        damping: assumed standard deviation of the noise in every element of the matrix.
    """
    white = right.apply(left.apply(matrix).mT).mT
    fitted_left = left.fitted(white, damping**2 * right.gain(), rate)
    fitted_right = right.fitted(white.mT, damping**2 * left.gain(), rate)
    # Only the product of the two factors matters. Balance them, so that one cannot grow while the other shrinks.
    by = jnp.sqrt(fitted_right.largest() / fitted_left.largest())
    return white, fitted_left.scaled(by), fitted_right.scaled(1 / by)


def _smoothed(steepness: jax.Array, now: jax.Array) -> jax.Array:
    return jnp.maximum(_SMOOTHING * steepness + (1 - _SMOOTHING) * now, now)


def _spectral_norm(matrix: jax.Array) -> jax.Array:
    """A lower bound of the spectral norm of a symmetric positive matrix; tight if few eigenvalues are large."""
    square = jnp.sum(jnp.square(matrix @ matrix), (-2, -1))
    return jnp.sqrt(square / jnp.maximum(jnp.sum(jnp.square(matrix), (-2, -1)), _TINY))


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
