"""Nowcasting: weights that are moved, once, to where their trend would take them in some steps.

Source: the method of caramba's training guide, a linear regression over recent weights, with running sums instead of copies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval

from jaxlm.core.guards import NOWCAST


class WeightTrend(NamedTuple):
    """Running sums for the least-squares line through recent weights.

    A point is the age of weights in steps, and their difference from the weights now. It counts `decay^age`. Sums of
    differences have no digits that cancel, so a slope of 1e-6 of a weight is as exact as a larger one.

    Attributes:
        count: int32, number of updates since the sums began.
        ages: float32 {3}, sums of the weights of the points, of their ages, and of the squares of these.
        differences, products: with the structure of the parameters: sums of the differences, and of them times the ages.
    """

    count: jax.Array
    ages: jax.Array
    differences: Any
    products: Any


@dataclass(frozen=True)
class Nowcast:
    """Keeps the trend of the weights, and moves them along it in the step in which the control `nowcast` is above 0.

    It needs two more copies of the parameters. After such a step, and at the start, the trend begins anew, and until it has
    `window` updates, the control does nothing.

    Attributes:
        window: about how many recent updates the trend follows: a point that is one step older counts 1 - 1 / window times as
            much.
    """

    window: Annotated[int, Interval(ge=2, le=100_000)] = 20

    def build(self) -> optax.GradientTransformationExtraArgs:
        """The transformation of finished updates, which comes last."""
        decay = 1 - 1 / self.window

        def begun(params: Any) -> WeightTrend:
            differences, products = (jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params) for _ in range(2))
            return WeightTrend(jnp.zeros((), jnp.int32), jnp.asarray([1.0, 0.0, 0.0]), differences, products)

        def update_fn(
            updates: Any,
            state: Any,
            params: Any = None,
            *,
            controls: Mapping[str, jax.Array] | None = None,
            **_: Any,
        ) -> tuple[Any, WeightTrend]:
            n, age, square = state.ages
            # All points are one step older, and their differences are from the new weights, which are a new point.
            products = jax.tree.map(
                lambda z, y, u: decay * (z + y - (age + n) * u), state.products, state.differences, updates
            )
            differences = jax.tree.map(lambda y, u: decay * (y - n * u), state.differences, updates)
            ages = jnp.stack([1 + decay * n, decay * (age + n), decay * (square + 2 * age + n)])
            steps = jnp.zeros(()) if not controls or NOWCAST not in controls else controls[NOWCAST]
            moves = (steps > 0) & (state.count + 1 >= self.window)
            ahead = jnp.where(moves, steps, 0.0)
            n, age, square = ages
            per_step = -ahead / (n * square - age * age)  # ages grow backwards
            moved = jax.tree.map(
                lambda u, y, z: (u + per_step * (n * z - age * y)).astype(u.dtype), updates, differences, products
            )
            new = WeightTrend(state.count + 1, ages, differences, products)
            return moved, jax.tree.map(lambda fresh, old: jnp.where(moves, fresh, old), begun(updates), new)

        return optax.GradientTransformationExtraArgs(begun, update_fn)
