"""Updates of a small model of every kind of parameter, on one device and on eight."""

from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlm.core import tree
from jaxlm.core.sharding import Layout
from jaxlm.engine.state import place_state, shardings
from jaxlm.models.linear import ExpertLinear, Linear
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.groups import build_optimizer, parameter_groups

LAYERS, EXPERTS, HEADS, SIZE, MLP, EMBED, VOCAB = hax.make_axes(
    layers=3, experts=2, heads=2, head_size=4, mlp=8, embed=16, vocab=8
)
NUM_STEPS = 200
Arrays = dict[str, np.ndarray]
AXES = {
    "q.weight": (LAYERS, HEADS, SIZE, EMBED),
    "up.weight": (LAYERS, EXPERTS, EMBED, MLP),
    "norm.weight": (LAYERS, EMBED),
    "head.weight": (VOCAB, EMBED),
}
# The axes within one tensor, by number, of an array as in `AXES`.
WITHIN = {"q.weight": (1, 2, 3), "up.weight": (2, 3), "norm.weight": (1,), "head.weight": (0, 1), "plain": (0,)}


def numbers(seed: int, scale: float = 1.0) -> Arrays:
    """Random arrays, in float32 so that both sides have the same."""
    rng = np.random.default_rng(seed)
    shapes = {path: tuple(axis.size for axis in axes) for path, axes in AXES.items()} | {"plain": (5,)}
    return {path: (scale * rng.normal(size=shape)).astype(np.float32) for path, shape in shapes.items()}


def as_model(arrays: Arrays, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Projections with heads, experts, a norm, a head without layers, and an array without names."""
    named = lambda path: hax.named(jnp.asarray(arrays[path], dtype), AXES[path])  # noqa: E731
    return {
        "q": Linear(named("q.weight"), None, EMBED, (HEADS, SIZE)),
        "up": ExpertLinear(named("up.weight"), EMBED, MLP),
        "norm": {"weight": named("norm.weight")},
        "head": Linear(named("head.weight"), None, EMBED, VOCAB),
        "plain": jnp.asarray(arrays["plain"], dtype),
    }


def flat(params: Any) -> Arrays:
    return {path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(params)}


class Updates:
    """An optimizer, its compiled update, and the model that it updates."""

    def __init__(self, config: OptimizerConfig, num_steps: int = NUM_STEPS, where: Layout | None = None):
        self._where = where
        self.model = as_model(numbers(0))
        self.optimizer = build_optimizer(config, parameter_groups(self.model, config), num_steps)
        self.state = self._placed(lambda: self.optimizer.init(as_model(numbers(0))))
        self.model = self._placed(lambda: as_model(numbers(0)))

        def update(params: Any, state: Any, gradient: Any, extra: dict[str, Any]) -> Any:
            updates, state = self.optimizer.update(gradient, state, params, **extra)
            return optax.apply_updates(params, updates), state

        if where is None:
            self.update = jax.jit(update)
            return
        abstract = jax.eval_shape(lambda: (self.model, self.state))
        self.update = jax.jit(update, out_shardings=shardings(abstract, where))

    def _placed(self, make: Any) -> Any:
        if self._where is None:
            return jax.jit(make)()
        with self._where.use():
            return place_state(make, jax.eval_shape(make), self._where)

    def step(self, gradient: Arrays, **controls: float) -> Arrays:
        """The parameters after one more update."""
        extra = {"controls": {name: jnp.float32(value) for name, value in controls.items()}} if controls else {}
        given = as_model(gradient)
        if self._where is None:
            self.model, self.state = self.update(self.model, self.state, given, extra)
        else:
            with self._where.use():
                placed = jax.device_put(given, shardings(given, self._where))
                self.model, self.state = self.update(self.model, self.state, placed, extra)
        return flat(self.model)

    def state_of(self, kind: type) -> Any:
        """The part of the optimizer's state that has this class."""
        nodes = jax.tree.leaves(self.state, is_leaf=lambda x: isinstance(x, kind))
        return next(node for node in nodes if isinstance(node, kind))
