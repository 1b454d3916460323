"""What an optimizer may ask of the loss beside its gradient.

Every step offers it (`curvature`, an extra argument of optax's `update`). Only asking costs anything: an optimizer that
does not ask has the same program as if there were nothing to ask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

# The step's other uses of its key fold in the numbers of micro-batches.
_DIRECTIONS = 2**31 - 1


@dataclass(frozen=True)
class Curvature:
    """The loss of one micro-batch around a step's parameters.

    Attributes:
        gradient: parameters -> the gradient there, which can be differentiated once more (forward mode). It is that of
            the micro-batch alone: its sums are over its own weights.
        key: makes the step's randomness.
    """

    gradient: Callable[[Any], Any]
    key: Callable[[], jax.Array]

    def direction(self, params: Any, seed: int) -> Any:
        """Standard normal numbers in the parameters' shapes and dtypes, the same on every mesh, anew in every step."""
        key = jax.random.fold_in(jax.random.fold_in(self.key(), _DIRECTIONS), seed)
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        drawn = [jax.random.normal(own, leaf.shape, leaf.dtype) for own, leaf in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, drawn)

    def diagonal(self, params: Any, seed: int) -> Any:
        """An unbiased estimate of the diagonal of the Hessian: u * (H u) for a random direction u.

        Source: Hutchinson 1990, A stochastic estimator of the trace of the influence matrix for Laplacian smoothing
        splines; as Liu et al. 2023 (arXiv:2305.14342), algorithm 1. Costs about three gradients.

        Args:
            seed: other numbers draw other directions.
        """
        u = self.direction(params, seed)
        _, along_u = jax.jvp(self.gradient, (params,), (u,))
        return jax.tree.map(lambda u, h: u * h, u, along_u)
