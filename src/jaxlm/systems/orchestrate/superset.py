"""One gradient transformation for all strategies of a portfolio. A number selects the strategy that makes the update.

Its state is that of AdamW and a few scalars, whatever the number of strategies: see docs/design/0033.

    gradient -> AdaGC? -> global norm -> mu, nu -> each rule that the table has -> the strategy's -> weight decay
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.guards import STRATEGY
from jaxlm.optim.base import ParameterGroup
from jaxlm.optim.clipping import AdaGc, with_array, with_arrays
from jaxlm.optim.matrices import matrices
from jaxlm.optim.orthogonal import map_sharded_matrices, newton_schulz
from jaxlm.systems.orchestrate.strategies import Moments, Muon, Number, Strategy, adam_direction

_NUM_ITERATIONS = 5
_EPSILON = 1e-8  # added to the norm of a matrix
_SMALLEST = 1e-30  # of a mean that another one is divided by


class PortfolioState(NamedTuple):
    """The state that all strategies share. What no strategy of the table needs is None.

    Attributes:
        mu: running mean of the gradients.
        nu: running mean of their squares, None for parameters whose squares no strategy needs.
        mu_weight, nu_weight: sums of the weights of those means: what Adam divides by as its bias correction. It stays right
            when the decay rate changes.
        matrix_mu_weight: that of hidden matrices, whose mean has a decay rate of its own in Muon.
        adagc: the norms of AdaGC (`AdaGcState`), which go on while another strategy does not clip by them.
        step_square, step_dot: running means of the squared norm of Adam's step, and of its product with the gradient.
    """

    mu: Any
    nu: Any
    mu_weight: jax.Array
    nu_weight: jax.Array | None
    matrix_mu_weight: jax.Array | None
    adagc: Any
    step_square: jax.Array | None
    step_dot: jax.Array | None


@dataclass(frozen=True)
class Table:
    """The strategies, and the one that makes this update.

    Attributes:
        row: its number, which may be traced.
    """

    rows: Sequence[Strategy]
    row: int | jax.Array

    def number(self, of: Callable[[Strategy], float]) -> Number:
        """A number of the strategy. One that is the same for all is a constant of the program."""
        values = [float(of(strategy)) for strategy in self.rows]
        return values[0] if len(set(values)) == 1 else jnp.asarray(values, jnp.float32)[self.row]

    def flag(self, of: Callable[[Strategy], bool]) -> bool | jax.Array:
        """Tells whether something is true of the strategy."""
        values = [of(strategy) for strategy in self.rows]
        return values[0] if len(set(values)) == 1 else jnp.asarray(values)[self.row]

    def numbers(self, rule: type[Strategy]) -> dict[str, Number]:
        """The fields of a rule. If the strategy has another one, they are those of any strategy with this rule."""
        any_of = next(one for one in self.rows if type(one) is rule)
        shared = {field.name for field in dataclasses.fields(Strategy)}
        names = [field.name for field in dataclasses.fields(rule) if field.name not in shared]
        return {
            name: self.number(lambda one, name=name: getattr(one if type(one) is rule else any_of, name))
            for name in names
        }

    @property
    def rules(self) -> list[type[Strategy]]:
        """Each rule once, in the order of the table."""
        return list(dict.fromkeys(type(one) for one in self.rows))


@dataclass(frozen=True)
class Superset:
    """The gradient transformation, from gradients to directions with weight decay, before the learning rate.

    Attributes:
        rows: the strategies.
        initial: number of the strategy while no control selects one.
        weight_decay: of strategies without their own.
        adagc: how strategies with `adagc` clip; None if there is none.
        decaying: paths of the parameters that decay.
        matrices: paths of the hidden matrices, if a strategy has directions of its own for them.
    """

    rows: tuple[Strategy, ...]
    initial: int
    weight_decay: float
    adagc: AdaGc | None
    decaying: frozenset[str]
    matrices: frozenset[str]

    @staticmethod
    def of(
        rows: Sequence[Strategy],
        initial: int,
        weight_decay: float,
        adagc: AdaGc | None,
        groups: Sequence[ParameterGroup],
    ) -> "Superset":
        """The transformation for groups of parameters."""
        decaying = frozenset(path for group in groups if group.weight_decay for path in group.paths)
        matrices = frozenset(path for group in groups if group.as_matrices for path in group.paths)
        orthogonalizes = any(one.orthogonalizes for one in rows)
        return Superset(
            tuple(rows), initial, weight_decay, adagc, decaying, matrices if orthogonalizes else frozenset()
        )

    def build(self) -> optax.GradientTransformationExtraArgs:
        """The transformation, which reads the control `strategy`."""
        return optax.GradientTransformationExtraArgs(self._init, self._update)

    def _init(self, params: Any) -> Any:
        def squares(path: str, leaf: Any) -> Any:
            in_matrix = path in self.matrices
            needed = any(one.needs_matrix_squares if in_matrix else one.square_decay is not None for one in self.rows)
            return with_array(leaf, jnp.zeros_like(tree.raw(leaf))) if needed else None

        zero = lambda needed: jnp.zeros((), jnp.float32) if needed else None  # noqa: E731
        compares = any(one.compared_epsilon is not None for one in self.rows)
        has_squares = any(one.square_decay is not None for one in self.rows)
        return PortfolioState(
            mu=jax.tree.map(jnp.zeros_like, params),
            nu=tree.map_leaves(squares, params) if has_squares else None,
            mu_weight=jnp.zeros((), jnp.float32),
            nu_weight=zero(has_squares),
            matrix_mu_weight=zero(self._orthogonalizes),
            adagc=None if self.adagc is None else self.adagc.build().init(params),
            step_square=zero(compares),
            step_dot=zero(compares),
        )

    def _update(
        self,
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        controls: Mapping[str, jax.Array] | None = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        table = Table(self.rows, self._row(controls or {}))
        updates, adagc = self._clipped(table, updates, state.adagc)
        moments, state = self._moments(table, updates, state._replace(adagc=adagc))
        directions = {path: self._direction(table, one) for path, one in moments.items()}
        if self._orthogonalizes:
            directions |= self._orthogonal(table, updates, moments, directions)
        return self._decayed(table, updates, directions, params), state

    def _row(self, controls: Mapping[str, jax.Array]) -> int | jax.Array:
        if STRATEGY not in controls:
            return self.initial
        return jnp.clip(jnp.round(controls[STRATEGY]).astype(jnp.int32), 0, len(self.rows) - 1)

    def _clipped(self, table: Table, updates: Any, norms: Any) -> tuple[Any, Any]:
        """The gradients that the strategy sees, and the norms of AdaGC after them."""
        if self.adagc is not None:
            clipped, norms = self.adagc.build().update(updates, norms)
            chosen = table.flag(lambda one: bool(one.adagc))
            updates = jax.tree.map(lambda new, old: jnp.where(chosen, new, old), clipped, updates)
        if any(one.max_grad_norm is not None for one in self.rows):
            most = table.number(lambda one: math.inf if one.max_grad_norm is None else one.max_grad_norm)
            norm = optax.global_norm(updates)
            scale = jnp.where(norm < most, 1.0, most / norm)
            updates = jax.tree.map(lambda g: g * scale, updates)
        return updates, norms

    def _moments(self, table: Table, updates: Any, state: Any) -> tuple[dict[str, Moments], PortfolioState]:
        """Returns what the rules read, by path, and the state after this gradient."""
        decays, shares = _decay(table, lambda one: one.mean_decay)
        mu_weight = decays * state.mu_weight + shares
        of_matrices = (decays, shares, mu_weight)
        if self._orthogonalizes:
            decay, share = _decay(table, lambda one: one.matrix_mean_decay)
            of_matrices = (decay, share, decay * state.matrix_mu_weight + share)
        nu_decay, nu_share = self._square_decay(table)
        nu_weight = None if state.nu_weight is None else nu_decay * state.nu_weight + nu_share
        before, squares = dict(tree.leaves(state.mu)), dict(tree.leaves(state.nu))
        moments = {}
        for path, leaf in tree.leaves(updates):
            decay, share, weight = of_matrices if path in self.matrices else (decays, shares, mu_weight)
            g, old = tree.raw(leaf), tree.raw(before[path])
            nu = nu_decay * tree.raw(squares[path]) + nu_share * jnp.square(g) if path in squares else None
            moments[path] = Moments(g, old, decay * old + share * g, weight, nu, nu_weight, None)
        square, dot = state.step_square, state.step_dot
        if square is not None and dot is not None:
            first = next(one.compared_epsilon for one in self.rows if one.compared_epsilon is not None)
            epsilon = table.number(lambda one: first if one.compared_epsilon is None else one.compared_epsilon)
            steps = {path: adam_direction(one, epsilon) for path, one in moments.items()}
            square = nu_decay * square + nu_share * sum(jnp.sum(jnp.square(step)) for step in steps.values())
            dot = nu_decay * dot + nu_share * sum(
                jnp.sum(step * moments[path].gradient) for path, step in steps.items()
            )
            rate = jnp.where(dot > 0, square / jnp.maximum(dot, _SMALLEST), 0.0)
            moments = {path: one._replace(sgd_rate=rate) for path, one in moments.items()}
        return moments, PortfolioState(
            mu=with_arrays(state.mu, {path: one.mu for path, one in moments.items()}),
            nu=with_arrays(state.nu, {path: one.nu for path, one in moments.items() if one.nu is not None}),
            mu_weight=mu_weight,
            nu_weight=nu_weight,
            matrix_mu_weight=of_matrices[2] if self._orthogonalizes else None,
            adagc=state.adagc,
            step_square=square,
            step_dot=dot,
        )

    def _square_decay(self, table: Table) -> tuple[Number, Number]:
        """Decay rate of the squares, and the weight of new ones.

        While a rule without squares runs, they are those of the first strategy that has them, so that a return is warm.
        """
        usual = next((one.square_decay for one in self.rows if one.square_decay is not None), 0.0)
        return _decay(table, lambda one: usual if one.square_decay is None else one.square_decay)

    def _direction(self, table: Table, moments: Moments) -> jax.Array:
        """The direction of the strategy's rule, elementwise. Each rule that the table has is computed once."""
        # A matrix without squares is updated by Muon, which is chosen later.
        rules = [rule for rule in table.rules if rule is not Muon or moments.nu is not None]
        result = rules[-1].direction(moments, table.numbers(rules[-1])) if rules else jnp.zeros_like(moments.mu)
        for rule in rules[:-1]:
            is_chosen = table.flag(lambda one, rule=rule: type(one) is rule)
            result = jnp.where(is_chosen, rule.direction(moments, table.numbers(rule)), result)
        return result

    def _orthogonal(
        self, table: Table, updates: Any, moments: Mapping[str, Moments], others: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The directions of hidden matrices: orthogonalized if the strategy does that, unchanged otherwise."""
        is_active = table.flag(lambda one: one.orthogonalizes)
        numbers = table.numbers(Muon)
        views = {path: view for path, view in matrices(updates).items() if path in self.matrices}
        ahead = {
            path: dataclasses.replace(view, weight=NamedArray(Muon.ahead(moments[path], numbers), view.weight.axes))
            for path, view in views.items()
        }
        iterate = functools.partial(newton_schulz, num_steps=_NUM_ITERATIONS, epsilon=_EPSILON)
        orthogonal = map_sharded_matrices(iterate, ahead, None if is_active is True else jnp.asarray(is_active))
        chosen = {}
        for path, view in views.items():
            scale = 0.2 * math.sqrt(max(view.matrix.shape[-2:]))
            chosen[path] = jnp.where(is_active, scale * orthogonal[path].array, others[path])
        return chosen

    def _decayed(self, table: Table, updates: Any, directions: Mapping[str, jax.Array], params: Any) -> Any:
        decay = table.number(lambda one: self.weight_decay if one.weight_decay is None else one.weight_decay)
        # The learning rate that follows is that of matrices.
        scale = table.number(lambda one: one.others_scale)
        weights = dict(tree.leaves(params))

        def decayed(path: str, leaf: Any) -> Any:
            array = directions[path]
            if path in self.decaying:
                array = array + decay * tree.raw(weights[path])
            return with_array(leaf, array if path in self.matrices else array * scale)

        return tree.map_leaves(decayed, updates)

    @property
    def _orthogonalizes(self) -> bool:
        return any(one.orthogonalizes for one in self.rows)


def _decay(table: Table, of: Callable[[Strategy], float]) -> tuple[Number, Number]:
    """A decay rate, and the weight of what is new, which float32 would round differently if it were 1 minus the rate."""
    return table.number(of), table.number(lambda one: 1 - of(one))
