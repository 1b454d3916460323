"""A portfolio (`type: portfolio`): several optimizers with one state, of which a controller may select another.

It may do so between any two steps. Nowcasting moves weights, once, to where their trend would take them in some steps
(`Nowcast`).

Source: caramba's training guide: its orchestrated training, as one gradient transformation (docs/design/0033); nowcasting,
a linear regression over recent weights, with running sums instead of copies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeFloat
from jaxlm.core.guards import LR_SCALE, NOWCAST, STRATEGY, OptimizerFacts
from jaxlm.core.rules import Rules, excludes
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, scale_by_learning_rate
from jaxlm.optim.clipping import AdaGc
from jaxlm.reading.choices import choice
from jaxlm.systems.orchestrate.strategies import TABLES, Strategy
from jaxlm.systems.orchestrate.superset import Superset


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


@choice(OptimizerConfig, "portfolio")
class PortfolioConfig(OptimizerConfig):
    """Several strategies, of which one makes each update. All read the same state, which is as large as that of AdamW.

    Without a controller that selects another one, `initial` makes all updates. A switch converts nothing and restarts
    nothing: the learning rate is the schedule's times the strategy's `lr_scale`, the momentum of the new rule is the mean of
    the gradients so far, and the second moment goes on while a rule without one runs.

    Attributes:
        learning_rate: peak learning rate of a strategy with `lr_scale: 1`.
        weight_decay: decoupled weight decay of strategies without their own. With 0, no parameter decays, and no strategy may
            have its own.
        strategies: name -> strategy. Or the name of a table: guide has the four strategies of caramba's training guide;
            caramba the five of its code, with their numbers.
        initial: name of the strategy that makes the updates until a controller selects another one. Null is the first.
        nowcast: keep the trend of the weights, so that a controller can move them along it (the control `nowcast`); null
            keeps none.
    """

    weight_decay: NonNegativeFloat = 0.01
    strategies: dict[str, Strategy] | Literal["guide", "caramba"] = "guide"
    initial: str | None = None
    nowcast: Nowcast | None = None

    separates_matrices: ClassVar[bool] = True
    key_rules: ClassVar[Rules] = (
        excludes("nowcast", when="state", why="as 8 bits keep nothing of the differences of close numbers in a trend"),
    )

    def __post_init__(self):
        if self.match is not None or self.groups:
            raise ConfigError(
                f"{'groups' if self.groups else 'match'}: given, but a strategy acts on all parameters together, and so do"
                " its norm clipping and the control that selects it. Use another type than portfolio, or remove the key"
            )
        if not self.table:
            raise ConfigError("strategies: empty. Add a strategy, or remove the key for those of the guide")
        if self.initial is not None and self.initial not in self.table:
            raise ConfigError(f"initial: '{self.initial}' given, but the strategies are {', '.join(self.table)}")
        for name, strategy in self.table.items():
            if strategy.weight_decay and not self.weight_decay:
                raise ConfigError(
                    f"strategies: the weight_decay of '{name}' is {strategy.weight_decay}, but optimizer.weight_decay is 0,"
                    " with which no parameter decays. Set it above 0 (strategies without their own have it)"
                )
        sections = {name: _adagc(strategy.adagc) for name, strategy in self.table.items() if strategy.adagc}
        if len(set(sections.values())) > 1:
            raise ConfigError(
                f"strategies: {' and '.join(sections)} have different sections adagc, but the norms that these compare with"
                " are kept once. Give them the same"
            )
        if sections and self.adagc is not None:
            raise ConfigError(
                f"adagc: given, but {', '.join(sections)} has adagc too, so that its gradients would be clipped twice. Remove"
                " one"
            )

    @property
    def table(self) -> Mapping[str, Strategy]:
        """The strategies by name, in the order of their numbers."""
        return TABLES[self.strategies] if isinstance(self.strategies, str) else self.strategies

    @property
    def facts(self) -> OptimizerFacts:
        first = self._first
        factor = self.table[first].lr_scale
        controls = {
            name: {STRATEGY: float(row), LR_SCALE: strategy.lr_scale / factor}
            for row, (name, strategy) in enumerate(self.table.items())
        }
        return replace(
            super().facts,
            learning_rate=self.learning_rate * factor,
            strategies={first: controls[first]} | controls,
            nowcast_window=None if self.nowcast is None else self.nowcast.window,
        )

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        names, rows = list(self.table), tuple(self.table.values())
        adagc = next((_adagc(row.adagc) for row in rows if row.adagc), None)
        directions = Superset.of(rows, names.index(self._first), self.weight_decay, adagc, groups).build()
        rate = scale_by_learning_rate(self.schedule(num_steps))
        nowcast = [] if self.nowcast is None else [self.nowcast.build()]
        return optax.with_extra_args_support(optax.chain(directions, rate, *nowcast))

    @property
    def _first(self) -> str:
        return next(iter(self.table)) if self.initial is None else self.initial


def _adagc(section: bool | AdaGc) -> AdaGc:
    return section if isinstance(section, AdaGc) else AdaGc()
