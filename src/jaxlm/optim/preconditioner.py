"""What whitens one side of a matrix: a factor Q whose square multiplies it, fitted a step at a time without inverses.

Source: Li 2015 (arXiv:1512.04202) for the criterion, tr(P g g') + tr(P^-1), least where the whitened P g has uncorrelated
entries of variance 1; Li 2024 (arXiv:2402.11858) for fitting it in a group; the form that its author calls QUAD in
github.com/lixilinx/psgd_torch for the step, Q <- (1 - E) Q (1 - E), which keeps Q symmetric and positive with products
alone. Differently, so that nothing is drawn at random and no maximum is searched for that two meshes could find in other
places: the noise that damps is integrated out, and the spectral norm is bounded from below by two Frobenius norms.
"""

import abc

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import EMBED
from jaxlm.optim.matrices import size_of

_SMOOTHING = 0.9  # of the steepness: it rises at once, and falls by a tenth of the way in a step
_TINY = 1e-30  # no norm is divided by less


class Factor(eqx.Module):
    """Of a side of m rows. It is symmetric and positive, and so is its square, which the side is multiplied by.

    Attributes:
        root: Q, by the names of its axes: {stacked .., the side's axes .., basis}, without the last if it is diagonal.
        steepness: [..], of the criterion near Q: what a step is divided by.
    """

    root: eqx.AbstractVar[NamedArray]
    steepness: eqx.AbstractVar[jax.Array]

    @abc.abstractmethod
    def times(self, matrix: jax.Array) -> jax.Array:
        """[.., m, n] multiplied by the square, from the left."""

    @abc.abstractmethod
    def gain(self) -> jax.Array:
        """[..], the sum of the square's squared numbers: how much it makes of white noise in a column."""

    @abc.abstractmethod
    def fitted(self, white: jax.Array, noise: jax.Array, rate: float) -> "Factor":
        """One step towards rows that are uncorrelated and of squared length n.

        Args:
            white: [.., m, n], multiplied by the squares of both sides' factors.
            noise: [..], variance of the noise in n columns, multiplied by the square of the other side alone.
            rate: up to 1.
        """

    @abc.abstractmethod
    def scaled(self, by: jax.Array) -> "Factor":
        """Multiplied by [..]."""

    def largest(self) -> jax.Array:
        """[..], the largest number in it: of a symmetric and positive matrix, on its diagonal."""
        return jnp.max(self.root.array.reshape((*self.steepness.shape, -1)), -1)


class DenseFactor(Factor):
    """With all m x m numbers."""

    root: NamedArray
    steepness: jax.Array

    def times(self, matrix: jax.Array) -> jax.Array:
        return self._square() @ matrix

    def gain(self) -> jax.Array:
        return jnp.sum(jnp.square(self._square()), (-2, -1))

    def fitted(self, white: jax.Array, noise: jax.Array, rate: float) -> "DenseFactor":
        root, square, expected = self._flat(), self._square(), white.shape[-1]
        found = white @ white.mT + noise[..., None, None] * (square @ square)
        steepness = _followed(self.steepness, _spectral_norm(found) + expected)
        size = (0.5 * rate / steepness)[..., None, None]
        half = root - size * (found @ root - expected * root)
        whole = half - size * (half @ found - expected * half)
        return DenseFactor(self._named(0.5 * (whole + whole.mT)), steepness)

    def scaled(self, by: jax.Array) -> "DenseFactor":
        return DenseFactor(self._named(self._flat() * by[..., None, None]), self.steepness)

    def _flat(self) -> jax.Array:
        return self.root.array.reshape((*self.steepness.shape, -1, self.root.axes[-1].size))

    def _square(self) -> jax.Array:
        return self._flat() @ self._flat()

    def _named(self, flat: jax.Array) -> NamedArray:
        return hax.named(flat.reshape(self.root.array.shape), self.root.axes)


class DiagonalFactor(Factor):
    """With its diagonal alone, for sides that are too long."""

    root: NamedArray
    steepness: jax.Array

    def times(self, matrix: jax.Array) -> jax.Array:
        return jnp.square(self._flat())[..., None] * matrix

    def gain(self) -> jax.Array:
        return jnp.sum(self._flat() ** 4, -1)

    def fitted(self, white: jax.Array, noise: jax.Array, rate: float) -> "DiagonalFactor":
        root, expected = self._flat(), white.shape[-1]
        found = jnp.sum(jnp.square(white), -1) + noise[..., None] * root**4
        steepness = _followed(self.steepness, jnp.max(found, -1) + expected)
        size = (0.5 * rate / steepness)[..., None]
        return DiagonalFactor(self._named(root * jnp.square(1 - size * (found - expected))), steepness)

    def scaled(self, by: jax.Array) -> "DiagonalFactor":
        return DiagonalFactor(self._named(self._flat() * by[..., None]), self.steepness)

    def _flat(self) -> jax.Array:
        return self.root.array.reshape((*self.steepness.shape, -1))

    def _named(self, flat: jax.Array) -> NamedArray:
        return hax.named(flat.reshape(self.root.array.shape), self.root.axes)


def initial_factor(stacked: tuple[Axis, ...], side: tuple[Axis, ...], scale: float, max_dense_size: int) -> Factor:
    """`scale` times the identity, for a side with these axes of each of the stacked matrices."""
    steepness = jnp.zeros([axis.size for axis in stacked], jnp.float32)
    size = size_of(side)
    if size > max_dense_size:
        return DiagonalFactor(hax.full((*stacked, *side), scale, jnp.float32), steepness)
    # Where FSDP does not spread the side itself, it spreads the basis: no factor lies whole on every device.
    basis = Axis("basis" if EMBED in {axis.name for axis in side} else EMBED, size)
    axes = (*stacked, *side, basis)
    identity = jnp.broadcast_to(scale * jnp.eye(size, dtype=jnp.float32), (*steepness.shape, size, size))
    return DenseFactor(hax.named(identity.reshape([axis.size for axis in axes]), axes), steepness)


def precondition(
    matrix: jax.Array, left: Factor, right: Factor, *, rate: float, damping: float
) -> tuple[jax.Array, Factor, Factor]:
    """A matrix [.., m, n], multiplied by the squares of both its factors; and these, fitted to it by one step.

    Args:
        rate: of the step, up to 1.
        damping: standard deviation of the noise that the matrix is taken to have in every entry.
    """
    white = right.times(left.times(matrix).mT).mT
    fitted_left = left.fitted(white, damping**2 * right.gain(), rate)
    fitted_right = right.fitted(white.mT, damping**2 * left.gain(), rate)
    # Only their product matters; left alone, one could shrink as the other grows.
    by = jnp.sqrt(fitted_right.largest() / fitted_left.largest())
    return white, fitted_left.scaled(by), fitted_right.scaled(1 / by)


def _followed(steepness: jax.Array, now: jax.Array) -> jax.Array:
    return jnp.maximum(_SMOOTHING * steepness + (1 - _SMOOTHING) * now, now)


def _spectral_norm(matrix: jax.Array) -> jax.Array:
    """A lower bound of it, for a symmetric and positive matrix: near it where few eigenvalues are large."""
    square = jnp.sum(jnp.square(matrix @ matrix), (-2, -1))
    return jnp.sqrt(square / jnp.maximum(jnp.sum(jnp.square(matrix), (-2, -1)), _TINY))
