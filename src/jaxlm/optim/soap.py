"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner for hidden matrices, and Adam for all other parameters.

For one side of each stacked matrix G, the basis is that of the running mean of G G' (`Eigenbasis`): one power iteration,
orthonormalized by a QR decomposition. As in github.com/nikhilvyas/SOAP, the first basis is from an eigenvalue
decomposition, and columns are sorted by their estimated eigenvalues before each iteration.

Two differences. The first basis is found from G in parts: in G G', the rounding errors of the largest eigenvalues hide
those below 1e-6 of them, which are most in gradients of language models. And it is equal on every mesh: the eigenvectors of
eigenvalues below 1e-8 of the largest, which G G' has for every tall G, depend on how a mesh rounds the gradient.
Householder reflections complete the other eigenvectors instead.

Every device decomposes all matrices, one after the other. jaxlib's LAPACK calls split a batch over the threads that
simulated devices run in, so that eight devices would wait for each other forever.

Source: Vyas et al. 2024, SOAP: Improving and Stabilizing Shampoo using Adam (arXiv:2409.11321), algorithm 3, with section 6
for `one_diag`; algorithm 4 for the basis; github.com/nikhilvyas/SOAP for the first step.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray

from jaxlm.core.field_types import BelowOne, LearningRate, NonNegativeInt, PositiveFloat, PositiveInt
from jaxlm.core.sharding import replicated
from jaxlm.optim.base import OptimizerConfig, ParameterGroup
from jaxlm.optim.matrices import MatrixView, matrices, replace_matrices, square_axes, with_adam_fallback
from jaxlm.reading.choices import choice

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


@choice(OptimizerConfig, "soap")
class SoapConfig(OptimizerConfig):
    """Clips the global norm, applies Adam to matrices in their eigenbases and to the rest as it is, adds weight decay.

    Matrices are the same parameters as for Muon. Each layer's weight is one matrix, with all heads of a projection together.
    The state per m x n matrix is that of Adam plus 2 m^2 + 2 n^2 elements. The first step only finds the eigenbases: it does
    not update matrices, except by weight decay. Both learning rates follow the same schedule.

    Attributes:
        learning_rate: peak learning rate of matrices.
        adam_lr: peak learning rate of all other parameters.
        beta1: decay rate of the running mean of gradients, for matrices and for Adam.
        beta2: decay rate of the running mean of their squares, for matrices and for Adam.
        shampoo_beta: decay rate of the running means of G G' and G' G, whose eigenvectors are the bases.
        precondition_frequency: number of steps between updates of the bases. Every device computes the whole update.
        max_precond_dim: sides of a matrix that are longer than this are not rotated. A matrix with two such sides gets
            plain Adam.
        one_diag: rotate only the shorter side of each matrix, the rows if both are equal. This needs less memory and
            time, but the loss is slightly larger.
        correct_bias: divide the running means of matrices by their total weight, as Adam does.
        epsilon: added to the square root of the second moment, for matrices and for Adam. Not 0: a gradient of low rank is
            exactly 0 in some coordinates, where 0 would be divided by 0.
        max_grad_norm: maximum global gradient norm; larger gradients are scaled down to it. Null disables clipping.
    """

    learning_rate: LearningRate = 3e-3
    adam_lr: LearningRate = 3e-3
    beta1: BelowOne = 0.95
    beta2: BelowOne = 0.95
    shampoo_beta: BelowOne = 0.95
    precondition_frequency: PositiveInt = 10
    max_precond_dim: NonNegativeInt = 10_000
    one_diag: bool = False
    correct_bias: bool = True
    epsilon: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat | None = 1.0

    separates_matrices: ClassVar[bool] = True

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        return with_adam_fallback(
            self,
            groups,
            num_steps,
            ("soap", self._rotated_adam()),
            optax.scale_by_adam(self.beta1, self.beta2, self.epsilon),
            adam_lr=self.adam_lr,
            max_grad_norm=self.max_grad_norm,
        )

    def _rotated_adam(self) -> optax.GradientTransformation:
        def init_fn(params: Any) -> Any:
            memories = {path: self._first(view) for path, view in matrices(params).items()}
            return _State(jnp.zeros((), jnp.int32), memories)

        def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            directions, memories = {}, {}
            # Rotating there and back in TF32 or bfloat16 would make noise of the small coordinates.
            with jax.default_matmul_precision("highest"):
                for path, view in matrices(updates).items():
                    directions[path], memories[path] = self._step(view, state.memories[path], state.count)
            return replace_matrices(updates, directions), _State(state.count + 1, memories)

        return optax.GradientTransformation(init_fn, update_fn)

    def _first(self, view: MatrixView) -> "_Memory":
        rows, columns = hax.axis_size(view.outputs), hax.axis_size(view.inputs)
        rotate_rows = rows <= self.max_precond_dim and not (self.one_diag and rows > columns)
        rotate_columns = columns <= self.max_precond_dim and not (self.one_diag and columns >= rows)
        return _Memory(
            hax.zeros(view.weight.axes, jnp.float32),
            hax.zeros(view.weight.axes, jnp.float32),
            initial_eigenbasis(view.stacked, view.outputs) if rotate_rows else None,
            initial_eigenbasis(view.stacked, view.inputs) if rotate_columns else None,
        )

    def _step(self, view: MatrixView, memory: "_Memory", count: jax.Array) -> tuple[NamedArray, "_Memory"]:
        """The direction of all matrices in one weight, and their new state. `count` is the number of steps before."""
        gradient, is_first = view.of(view.weight.astype(jnp.float32)), count == 0
        mean = self.beta1 * view.of(memory.mean) + (1 - self.beta1) * gradient
        variance = self.beta2 * view.of(memory.variance) + (1 - self.beta2) * jnp.square(memory.into(gradient))
        num_seen = jnp.maximum(count, 1)  # the first gradient is not in the means
        unbiased = mean / (1 - self.beta1**num_seen), variance / (1 - self.beta2**num_seen)
        used_mean, used_variance = unbiased if self.correct_bias else (mean, variance)
        direction = memory.out_of(memory.into(used_mean) / (jnp.sqrt(used_variance) + self.epsilon))
        mean, variance, direction = (jnp.where(is_first, 0.0, x) for x in (mean, variance, direction))
        after = _Memory(view.named(mean), view.named(variance), memory.left, memory.right)
        after = after.observed(gradient, self.shampoo_beta).rotated(view, gradient, count, self.precondition_frequency)
        return view.named(direction).astype(view.weight.dtype), after


class _Memory(NamedTuple):
    """State of a matrix.

    Attributes:
        mean: running mean of the gradients.
        variance: running mean of the squares of their coordinates in the eigenbases.
        left, right: eigenbases of the rows and of the columns; None for a side that is not rotated.
    """

    mean: NamedArray
    variance: NamedArray
    left: Eigenbasis | None
    right: Eigenbasis | None

    def into(self, matrix: jax.Array) -> jax.Array:
        """The coordinates of [.., m, n] in both bases."""
        rows = matrix if self.left is None else self.left.into(matrix)
        return rows if self.right is None else self.right.into(rows.mT).mT

    def out_of(self, coordinates: jax.Array) -> jax.Array:
        """The inverse of `into`."""
        rows = coordinates if self.left is None else self.left.out_of(coordinates)
        return rows if self.right is None else self.right.out_of(rows.mT).mT

    def observed(self, gradient: jax.Array, decay: float) -> "_Memory":
        """With one more gradient in the covariances."""
        left = self.left and self.left.observed(gradient, decay)
        right = self.right and self.right.observed(gradient.mT, decay)
        return self._replace(left=left, right=right)

    def rotated(self, view: MatrixView, gradient: jax.Array, count: jax.Array, interval: int) -> "_Memory":
        """With new bases if it is time: in the first step, and then every `interval` steps."""

        def first(memory: _Memory) -> _Memory:
            left = memory.left and memory.left.first(gradient)
            right = memory.right and memory.right.first(gradient.mT)
            return memory._replace(left=left, right=right)

        def refreshed(memory: _Memory) -> _Memory:
            variance, left, right = view.of(memory.variance), memory.left, memory.right
            if left is not None:
                left, variance = left.refreshed(variance)
            if right is not None:
                right, turned = right.refreshed(variance.mT)
                variance = turned.mT
            return memory._replace(variance=view.named(variance), left=left, right=right)

        which = jnp.where(count == 0, 0, jnp.where(count % interval == 0, 1, 2))
        return jax.lax.switch(which, (first, refreshed, lambda memory: memory), self)


class _State(NamedTuple):
    count: jax.Array
    memories: dict[str, _Memory]
