"""An optimizer whose updates an objective slows down, or stops, layer by layer (`core/guards.py`)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.guards import Pace


def paced(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """The optimizer, which reads the extra argument `pace`. Without one, it is unchanged."""

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, pace: Pace | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        if pace is None:
            return optimizer.update(updates, state, params, **extra)
        before = state
        if pace.position is not None:
            is_new = pace.position == 0
            state = jax.tree.map(lambda new, old: jnp.where(is_new, new, old), optimizer.init(params), state)
        moved, after = optimizer.update(updates, state, params, **extra)
        scaled = _by_layer(pace.factors, lambda f, x: jnp.where(f > 0, x * f, 0).astype(x.dtype), moved)
        return scaled, _by_layer(pace.factors, lambda f, new, old: jnp.where(f > 0, new, old), after, before)

    return optax.GradientTransformationExtraArgs(optimizer.init, update_fn)


def _by_layer(factors: Mapping[str, jax.Array], combine: Callable[..., jax.Array], tree_: Any, *others: Any) -> Any:
    """Combines each leaf that belongs to a parameter with the factors of its layers, and with the leaves of other trees with
    its path. Leaves of no parameter, such as counts, stay as they are.
    """
    other_leaves = [dict(tree.leaves(other)) for other in others]

    def combined(path: str, leaf: Any) -> Any:
        # The state of a parameter is under its path, which may have a prefix and a suffix.
        factor = next((factor for name, factor in factors.items() if f".{name}." in f".{path}."), None)
        if factor is None:
            return leaf
        arrays = [tree.raw(other[path]) for other in other_leaves]
        if not tree.is_named(leaf):  # of a function that has been vectorized over layers
            assert leaf.shape[:1] == factor.shape, f"{path}: {leaf.shape} has no axis of layers"
            return combine(factor.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, *arrays)
        shape = [-1 if axis.name == LAYERS else 1 for axis in leaf.axes]
        return NamedArray(combine(factor.reshape(shape), leaf.array, *arrays), leaf.axes)

    return tree.map_leaves(combined, tree_)
