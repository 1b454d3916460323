"""The eigenbasis of the running mean of G G', for one side of each stacked matrix G.

Source: Vyas et al. 2024 (arXiv:2409.11321), algorithm 4: one power iteration, orthonormalized by a QR decomposition. As in
github.com/nikhilvyas/SOAP, the first basis is from an eigenvalue decomposition, and columns are sorted by their estimated
eigenvalues before each iteration.

Two differences. The first basis is found from G in parts: in G G', the rounding errors of the largest eigenvalues hide those
below 1e-6 of them, which are most in gradients of language models. And it is equal on every mesh: the eigenvectors of
eigenvalues below 1e-8 of the largest, which G G' has for every tall G, depend on how a mesh rounds the gradient. Householder
reflections complete the other eigenvectors instead.

Every device decomposes all matrices, one after the other. jaxlib's LAPACK calls split a batch over the threads that
simulated devices run in, so that eight devices would wait for each other forever.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.sharding import replicated
from jaxlm.optim.matrices import square_axes

_RANK_TOLERANCE = 1e-8  # with 1e-9, losses after 12 steps differ by 1.4e-5 between meshes, and without it by 2.3e-4
_EXACT = 1e-4  # eigenvectors of eigenvalues below this part of the largest are found without those above it


class Eigenbasis(eqx.Module):
    """An orthonormal basis for the m rows of stacked matrices [.., m, n].

    Attributes:
        covariance: running mean of G G', with axes {stacked .., the side's axes .., basis}.
        vectors: the basis vectors in columns, with the same axes.
    """

    covariance: NamedArray
    vectors: NamedArray

    def into(self, matrix: jax.Array) -> jax.Array:
        """The coordinates of the matrix's columns in the basis."""
        return _flat(self.vectors, matrix).mT @ matrix

    def out_of(self, coordinates: jax.Array) -> jax.Array:
        """The inverse of `into`."""
        return _flat(self.vectors, coordinates) @ coordinates

    def observed(self, gradient: jax.Array, decay: float) -> "Eigenbasis":
        """With one more gradient in the running mean, and the same vectors."""
        new = (gradient @ gradient.mT).reshape(self.covariance.array.shape)
        return Eigenbasis(self.covariance * decay + hax.named((1 - decay) * new, self.covariance.axes), self.vectors)

    def first(self, gradient: jax.Array) -> "Eigenbasis":
        """With the eigenvectors of G G' for the first gradient [.., m, n], those of the largest eigenvalues first."""
        return self._with(_map_each(_eigenvectors, gradient.reshape(-1, *gradient.shape[-2:])))

    def refreshed(self, variances: jax.Array) -> tuple["Eigenbasis", jax.Array]:
        """One power iteration nearer to the eigenvectors, and the variances of the coordinates [.., m, n] in their order."""
        size = self.vectors.axes[-1].size
        flat = (leaf.array.reshape(-1, size, size) for leaf in (self.covariance, self.vectors))
        vectors, order = _map_each(_power_iteration, *flat)
        order = order.reshape(*variances.shape[:-1], 1)
        return self._with(vectors), jnp.take_along_axis(variances, order, axis=-2)

    def _with(self, vectors: jax.Array) -> "Eigenbasis":
        return Eigenbasis(self.covariance, hax.named(vectors.reshape(self.vectors.array.shape), self.vectors.axes))


def initial_eigenbasis(stacked: tuple[Axis, ...], side: tuple[Axis, ...]) -> Eigenbasis:
    """Without any gradient: the identity for one side of each stacked matrix."""
    axes, size = square_axes(stacked, side), hax.axis_size(side)
    shape = [axis.size for axis in axes]
    identity = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), (*(axis.size for axis in stacked), size, size))
    return Eigenbasis(hax.zeros(axes, jnp.float32), hax.named(identity.reshape(shape), axes))


def _flat(square: NamedArray, like: jax.Array) -> jax.Array:
    """[.., m, m] for the stacked matrices `like` [.., m, n]."""
    return square.array.reshape((*like.shape[:-1], like.shape[-2]))


def _map_each(change: Callable[..., Any], *matrices: jax.Array) -> Any:
    """Maps over the first axis, on every device; see the module's description."""
    return jax.lax.map(lambda slices: change(*slices), replicated(matrices))


def _eigenvectors(gradient: jax.Array) -> jax.Array:
    """Those of G G' for G [m, n]. Each round finds some, and the next one decomposes what is left of G without them."""
    size = gradient.shape[0]
    column = jnp.arange(size)

    def found_more(found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        vectors, num_known, smallest, _ = found
        left = jnp.where(column[:, None] < num_known, 0, vectors.T @ gradient)
        values, turns = jnp.linalg.eigh(left @ left.T)
        smallest = jnp.where(num_known == 0, _RANK_TOLERANCE * values[-1], smallest)
        turned = vectors @ jnp.roll(turns[:, ::-1], num_known, axis=1)
        num_new = jnp.sum(values > jnp.maximum(_EXACT * values[-1], smallest))
        return jnp.where(column < num_known, vectors, turned), num_known + num_new, smallest, num_new

    start = jnp.eye(size, dtype=gradient.dtype), jnp.zeros((), int), jnp.zeros((), gradient.dtype), jnp.ones((), int)
    vectors, num_known, *_ = jax.lax.while_loop(lambda found: (found[3] > 0) & (found[1] < size), found_more, start)
    # A column of zeros adds no reflection, but a vector that is orthogonal to the others.
    return jnp.linalg.qr(jnp.where(column < num_known, vectors, 0))[0]


def _power_iteration(covariance: jax.Array, vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The new vectors, and for each the index of the one that it comes from."""
    grown = covariance @ vectors
    order = jnp.argsort(-jnp.sum(vectors * grown, axis=0))
    return jnp.linalg.qr(grown[:, order])[0], order
