"""The training step: one compiled function from (state, batch) to (state, report).

    cast the parameters once -> terms and gradient of each micro-batch, added up -> finite? -> update
                                                      (an optimizer may ask for second derivatives here)

Losses are sums until the end, so the result does not depend on how the batch is cut into micro-batches or spread over
devices (up to the order of float additions).
"""

import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax

from jaxlm.core.axes import MICROBATCH
from jaxlm.core.custom_vjp import twice_differentiable
from jaxlm.core.guards import StepGuard, StepStats, Verdict
from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout, at_rest
from jaxlm.core.tree import is_named
from jaxlm.core.types import Sum
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState, UpdateCounts, shardings, step_key
from jaxlm.engine.sync import reduce_flags
from jaxlm.engine.watch import Numbers, WatchConfig
from jaxlm.objectives.base import Metrics, ObjectiveConfig
from jaxlm.optim.curvature import Curvature


class Report(eqx.Module):
    """What a step tells the host, still on the devices.

    Attributes:
        metrics: float32 scalars by name.
        watched: what `WatchConfig.look` saw; empty where nothing is watched.
        flags: int32 {flag}, reduced over all processes.
    """

    metrics: dict[str, jax.Array]
    watched: Numbers
    flags: jax.Array


class _Sums(eqx.Module):
    """One batch, added up."""

    gradient: Any
    objective: jax.Array
    metrics: Metrics
    slots: dict[str, Any]


def make_train_step(
    phase: Phase, layout: Layout, precision: Precision, abstract: RunState, watch: WatchConfig | None = None
) -> jax.stages.Wrapped:
    """The jitted step of a phase: (state, batch, flags) -> (state, `Report`). The state is donated.

    A step whose objective or gradient norm is not finite, or that a judge leaves out, changes nothing but `step`,
    `guard.skipped` and what the judges remember: the choice is made inside the program, because the donated state could
    not be had back outside of it.

    Args:
        abstract: the state's shapes and dtypes (`Recipe.abstract_state`).
        watch: what to report beside the metrics. Parameters and optimizer state are those from before the update.
    """
    optimizer = phase.transformation(abstract.model)
    schedule = phase.optimizer.schedule(phase.num_steps)
    guards = phase.guards(precision)

    def train_step(state: RunState, batch: Any, flag_sync: jax.Array) -> tuple[RunState, Report]:
        sums = _add_up(phase, layout, precision, state, batch)
        norm = optax.global_norm(sums.gradient)
        finite = jnp.isfinite(sums.objective) & jnp.isfinite(norm)
        verdict = _apply_guards(guards, state.slots, StepStats(sums.objective, norm, finite))
        curvature = _curvature(phase, layout, precision, state, batch)
        updated, updates = _updated(phase, optimizer, state, sums, curvature)
        after = jax.tree.map(lambda new, old: jnp.where(verdict.applies, new, old), updated, state)
        skipped = state.guard.skipped + jnp.where(verdict.applies, 0, 1)
        always = (state.step + 1, skipped, after.slots | verdict.slot)
        after = eqx.tree_at(lambda s: (s.step, s.guard.skipped, s.slots), after, always)
        metrics = {f"train/{name}": total.mean() for name, total in sums.metrics.items()} | {
            "train/objective": sums.objective,
            "train/skipped_steps": skipped,
            "grad/norm/total": norm,
            "optim/learning_rate": schedule(state.guard.updates),
            **verdict.metrics,
        }
        seen: Numbers = {}
        if watch is not None:
            trees = {"grads": sums.gradient, "updates": updates, "params": state.model, "opt_state": state.opt_state}
            seen = watch.look(state.step + 1, trees, batch)
        return after, Report(
            {k: jnp.asarray(v, jnp.float32) for k, v in metrics.items()}, seen, reduce_flags(flag_sync)
        )

    placed = shardings(abstract, layout)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(placed, None, None),
        out_shardings=(placed, layout.replicated()),
    )


def _apply_guards(guards: Sequence[StepGuard], slots: dict[str, Any], stats: StepStats) -> Verdict:
    """What all judges together make of a step; the slot is theirs by name."""
    judged = {judge.name: judge.judge(slots[judge.name], stats) for judge in guards}
    applies = stats.finite
    for one in judged.values():
        applies = applies & one.applies
    metrics = {name: value for one in judged.values() for name, value in one.metrics.items()}
    return Verdict(applies, {name: one.slot for name, one in judged.items()}, metrics)


def _updated(
    phase: Phase,
    optimizer: optax.GradientTransformationExtraArgs,
    state: RunState,
    sums: _Sums,
    curvature: Curvature,
) -> tuple[RunState, Any]:
    """The state with the batch's update applied, whether it may be or not; and the update."""
    trainable, frozen = phase.split(state.model)
    updates, opt_state = optimizer.update(sums.gradient, state.opt_state, trainable, curvature=curvature)
    trainable = optax.apply_updates(trainable, updates)
    averages = {
        name: average.update(state.slots[name], trainable, state.guard.updates)
        for name, average in phase.averages.items()
    }
    after = RunState(
        step=state.step,
        key=state.key,
        model=eqx.combine(trainable, frozen, is_leaf=is_named),
        opt_state=opt_state,
        guard=UpdateCounts(updates=state.guard.updates + 1, skipped=state.guard.skipped),
        slots=sums.slots | averages,
    )
    return after, updates


def _add_up(phase: Phase, layout: Layout, precision: Precision, state: RunState, batch: Any) -> _Sums:
    """Gradient (in the parameters' dtype, at rest), objective and metrics of a batch, over all its micro-batches."""
    objective, loss_scale = phase.objective, precision.loss_scale
    trainable, frozen = phase.split(state.model)
    # One cast a step, outside of the accumulation loop.
    compute, frozen = precision.to_compute(trainable), precision.to_compute(frozen)
    denominators = _denominators(objective, batch)
    key = step_key(state)

    def value(compute: Any, micro: Any, slot: Any, number: jax.Array) -> tuple[jax.Array, tuple[Any, Metrics, Any]]:
        model = eqx.combine(compute, frozen, is_leaf=is_named)
        terms, metrics, slot = objective.terms(model, micro, slot, key=jax.random.fold_in(key, number))
        total = _total(terms, denominators)
        return loss_scale.scaled(total, state.slots), (total, metrics, slot)

    def one_micro_batch(carry: tuple[Any, Any], micro: Any, number: jax.Array):
        gradient, slot = carry
        (_, (total, metrics, slot)), piece = jax.value_and_grad(value, has_aux=True)(compute, micro, slot, number)
        gradient = jax.tree.map(lambda sum_, g: sum_ + g.astype(sum_.dtype), gradient, piece)
        return (at_rest(gradient, layout), slot), (total, metrics)

    Micro = _micro_axis(batch)
    carry = (at_rest(jax.tree.map(jnp.zeros_like, trainable), layout), state.slots.get("objective"))
    (gradient, slot), (totals, metrics) = hax.scan(one_micro_batch, Micro)(carry, batch, jnp.arange(Micro.size))
    add = lambda many: jax.tree.map(lambda x: jnp.sum(x, axis=0), many)  # noqa: E731
    slots = state.slots if slot is None else {**state.slots, "objective": slot}
    return _Sums(loss_scale.unscaled(gradient, state.slots), add(totals), add(metrics), slots)


def _curvature(phase: Phase, layout: Layout, precision: Precision, state: RunState, batch: Any) -> Curvature:
    """The objective of the batch's first micro-batch around the trainable parameters. Nothing of it is computed here."""
    objective, wide = phase.objective, precision.wide

    def value(trainable: Any) -> jax.Array:
        _, frozen = phase.split(state.model)
        first = jax.tree.map(lambda column: column[MICROBATCH, 0], batch, is_leaf=is_named)
        key = jax.random.fold_in(step_key(state), 0)
        with twice_differentiable():
            model = eqx.combine(wide.to_compute(trainable), wide.to_compute(frozen), is_leaf=is_named)
            terms, _, _ = objective.terms(model, first, state.slots.get("objective"), key=key)
        return _total(terms, _denominators(objective, first))

    def gradient(trainable: Any) -> Any:
        return at_rest(jax.grad(value)(at_rest(trainable, layout)), layout)

    return Curvature(gradient, functools.partial(step_key, state))


def _denominators(objective: ObjectiveConfig, batch: Any) -> dict[str, jax.Array]:
    return {name: jnp.maximum(weight, 1.0) for name, weight in objective.weights(batch).items()}


def _total(terms: dict[str, Sum], denominators: dict[str, jax.Array]) -> jax.Array:
    return sum((term.total / denominators[name] for name, term in terms.items()), jnp.zeros(()))


def _micro_axis(batch: Any) -> hax.Axis:
    """The micro-batch axis that every column of a training batch begins with."""
    column = next(leaf for leaf in jax.tree.leaves(batch, is_leaf=is_named) if is_named(leaf))
    return column.resolve_axis(MICROBATCH)
