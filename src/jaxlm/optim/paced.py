"""An optimizer whose updates an objective slows down, or stops, layer by layer (`core/pace.py`)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.pace import Pace
from jaxlm.models.base import LanguageModel


def paced(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """The optimizer, which reads the extra argument `pace`. Without one, it is unchanged."""

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, pace: Pace | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        if pace is None:
            return optimizer.update(updates, state, params, **extra)
        if pace.position is not None:
            is_new = pace.position == 0
            state = jax.tree.map(lambda new, old: jnp.where(is_new, new, old), optimizer.init(params), state)
        moved, after = optimizer.update(updates, state, params, **extra)
        kept = lambda path, new, old: _by_layer(pace.factors, path, new, lambda f, x, o: jnp.where(f > 0, x, o), old)  # noqa: E731
        scaled = tree.map_leaves(
            lambda path, leaf: _by_layer(
                pace.factors, path, leaf, lambda f, x: jnp.where(f > 0, (x * f).astype(x.dtype), 0)
            ),
            moved,
        )
        return scaled, _map_models(kept, after, state)

    return optax.GradientTransformationExtraArgs(optimizer.init, update_fn)


def _by_layer(
    factors: Mapping[str, jax.Array], path: str, leaf: Any, combine: Callable[..., jax.Array], *others: Any
) -> Any:
    """Combines a leaf of this path with the factors of its layers. Leaves without layers stay as they are."""
    if path not in factors or not tree.is_named(leaf) or LAYERS not in (names := [axis.name for axis in leaf.axes]):
        return leaf
    shape = [-1 if name == LAYERS else 1 for name in names]
    return NamedArray(combine(factors[path].reshape(shape), leaf.array, *(other.array for other in others)), leaf.axes)


def _map_models(change: Callable[[str, Any, Any], Any], after: Any, before: Any) -> Any:
    """Changes the leaves of the parts of an optimizer state that have the model's structure, such as moments."""
    is_model = lambda node: isinstance(node, LanguageModel)  # noqa: E731

    def changed(new: Any, old: Any) -> Any:
        if not is_model(new):
            return new
        by_path = dict(tree.leaves(old))
        return tree.map_leaves(lambda path, leaf: change(path, leaf, by_path[path]), new)

    return jax.tree.map(changed, after, before, is_leaf=is_model)
