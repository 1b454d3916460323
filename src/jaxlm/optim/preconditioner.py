"""Kronecker factors that whiten a matrix: the square of a factor Q multiplies one side, and Q is fitted without inverses.

Source: Li 2015 (arXiv:1512.04202) for the criterion tr(P g g') + tr(P^-1), which is smallest when the whitened P g has
uncorrelated entries of variance 1. Li 2024 (arXiv:2402.11858) for fitting it in a group. The step is the variant QUAD of
github.com/lixilinx/psgd_torch: Q <- (1 - E) Q (1 - E), which keeps Q symmetric and positive with products alone.

Two differences make the result deterministic and equal on every mesh. The damping noise is integrated out instead of
sampled. The spectral norm is bounded from below by two Frobenius norms, without an argmax that could differ between meshes.
"""

import abc

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.optim.matrices import square_axes

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
