"""Curvature of the loss, for optimizers that need more than its gradient.

Every training step passes it to optax's `update` as the extra argument `curvature`. It costs nothing unless the optimizer
uses it: otherwise the compiled program is the same as without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax

from jaxlm.core import tree

# Differs from the microbatch numbers, which the step folds into the same key.
_DIRECTIONS = 2**31 - 1


@dataclass(frozen=True)
class Curvature:
    """Local curvature of the loss of one microbatch.

    Attributes:
        gradient: maps parameters to the gradient of the microbatch's loss, normalized by the microbatch's own weights.
            It can be differentiated once more (forward mode).
        key: returns the step's random key.
    """

    gradient: Callable[[Any], Any]
    key: Callable[[], jax.Array]

    def within(self, others: Any) -> "Curvature":
        """The curvature in part of the parameters, while the others are constant.

        Args:
            others: the parameters, with None in place of the part.
        """

        def gradient(part: Any) -> Any:
            paths = {path for path, _ in tree.leaves(part)}
            whole = self.gradient(eqx.combine(part, others, is_leaf=tree.is_named))
            return tree.map_leaves(lambda path, leaf: leaf if path in paths else None, whole)

        return Curvature(gradient, self.key)

    def direction(self, params: Any, seed: int) -> Any:
        """Standard normal samples with the parameters' shapes and dtypes: the same on every mesh, new in every step."""
        key = jax.random.fold_in(jax.random.fold_in(self.key(), _DIRECTIONS), seed)
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        samples = [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, samples)

    def diagonal(self, params: Any, seed: int) -> Any:
        """An unbiased estimate of the diagonal of the Hessian: u * (H u) for a random direction u.

        Source: Hutchinson 1990, A stochastic estimator of the trace of the influence matrix for Laplacian smoothing
        splines; as Liu et al. 2023 (arXiv:2305.14342), algorithm 1. Costs about three gradients.
        """
        u = self.direction(params, seed)
        _, along_u = jax.jvp(self.gradient, (params,), (u,))
        return jax.tree.map(lambda u, h: u * h, u, along_u)
