"""The training step: one compiled function from (state, refs, batch) to (state, report).

    cast parameters once -> sum loss terms and gradients over microbatches -> finite? -> update
                                                     (an optimizer may request second derivatives here)

Losses stay sums until the end, so the result does not depend on how the batch is split into microbatches or sharded over
devices (up to the order of float additions).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from jaxlm.core import guards
from jaxlm.core.axes import MICROBATCH
from jaxlm.core.guards import GRADIENT_NORM, OBJECTIVE, SKIPPED, UPDATE_NORM, StepGuard, StepStats
from jaxlm.core.pace import Pace
from jaxlm.core.parameters import split_by_rule
from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout, at_rest
from jaxlm.core.tracing import tracing
from jaxlm.core.tree import is_named, widened
from jaxlm.core.values.logged import LEARNING_RATE
from jaxlm.core.values.sums import Sum
from jaxlm.engine.accumulate import Accumulate, MicrobatchLoss, Sums, accumulate
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import OBJECTIVE_SLOT, RunState, UpdateCounts, in_device_memory, shardings, step_key
from jaxlm.engine.watch import Numbers, WatchConfig
from jaxlm.models.base import LanguageModel
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.optim.curvature import Curvature
from jaxlm.optim.groups import group_schedules
from jaxlm.optim.schedules import Schedule
from jaxlm.optim.stored_state import in_full

Refs = Mapping[str, LanguageModel]
OPTIMIZER_SCOPE = "optimizer"  # forecasts and profiles show what the update costs by this name


class StepReport(eqx.Module):
    """Results of a step for the host, still on the devices.

    Attributes:
        metrics: float32 scalars by name.
        watched: measurements of `WatchConfig.measure`; empty if `trainer.watch` is not set.
        flags: int32 {flag}, reduced over all processes.
    """

    metrics: dict[str, jax.Array]
    watched: Numbers
    flags: jax.Array


def make_train_step(
    phase: Phase,
    layout: Layout,
    precision: Precision,
    abstract: RunState,
    watch: WatchConfig | None = None,
    accumulate: Accumulate = accumulate,
) -> jax.stages.Wrapped:
    """The jitted step of a phase: (state, refs, batch, flags) -> (state, `StepReport`). The state is donated.

    `refs` are the models that the objective queries, by name; they keep their buffers.

    If the objective, the gradient norm or the update norm is not finite, or a guard rejects the step, only `step`,
    `guard.skipped` and the guards' slots change. The program itself makes this choice, because the donated input state is
    gone afterwards.

    `watch` sees the parameters and the optimizer state before the update. `accumulate` is the loop over the microbatches.
    """
    objective, loss_scale = phase.objective, precision.loss_scale
    update = _GuardedUpdate(
        phase,
        phase.transformation(abstract.model),
        phase.guards(precision),
        phase.optimizer.schedule(phase.num_steps),
        precision,
        watch,
    )

    def train_step(state: RunState, refs: Refs, batch: Any, flags: jax.Array) -> tuple[RunState, StepReport]:
        trainable, frozen = phase.split(state.model)
        # Cast once per step, outside the accumulation loop.
        compute, frozen = precision.cast_to_compute(trainable), precision.cast_to_compute(frozen)
        denominators = _denominators(objective, batch)
        key = step_key(state)
        keyed = objective.prepare_batch(batch, key)

        def annotate(slot: Any, microbatch: Any) -> Any:
            model = eqx.combine(compute, frozen, is_leaf=is_named)
            return objective.annotate(refs, microbatch, slot, model)

        def scaled_loss(compute: Any, microbatch: Any, slot: Any, number: jax.Array):
            model = eqx.combine(compute, frozen, is_leaf=is_named)
            with tracing(quantized_products=True):
                terms, metrics, slot = objective.terms(model, microbatch, slot, key=jax.random.fold_in(key, number))
            total = _total(terms, denominators)
            return loss_scale.scaled(total, state.slots), (total, metrics, slot)

        zeros = widened(jax.tree.map(jnp.zeros_like, trainable))
        slot, loss = state.slots.get(OBJECTIVE_SLOT), MicrobatchLoss(annotate, scaled_loss)
        sums = accumulate(loss, compute, zeros, keyed, slot, layout)
        sums = dataclasses.replace(sums, gradient=loss_scale.unscaled(sums.gradient, state.slots))
        curvature = _curvature(phase, layout, precision, state, refs, keyed)
        after, scalars, watched = update(in_device_memory(state, sums.objective), sums, curvature, batch)
        return after, StepReport(scalars, watched, jnp.max(flags, axis=0))  # a flag of any process counts

    state_shardings = shardings(abstract, layout)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(state_shardings, None, None, None),
        out_shardings=(state_shardings, layout.replicated()),
    )


@dataclasses.dataclass(frozen=True)
class _GuardedUpdate:
    """The update that a batch's sums make to the state, if they are finite and all guards accept it."""

    phase: Phase
    optimizer: optax.GradientTransformationExtraArgs
    guards: Sequence[StepGuard]
    schedule: Schedule
    precision: Precision
    watch: WatchConfig | None

    @jax.named_scope(OPTIMIZER_SCOPE)
    def __call__(
        self, state: RunState, sums: Sums, curvature: Curvature, batch: Any
    ) -> tuple[RunState, dict[str, jax.Array], Numbers]:
        """The state after the step, its metrics, and what `watch` measured."""
        gradient, by_rule = split_by_rule(sums.gradient)
        norm = optax.global_norm(gradient)
        trainable, _ = self.phase.split(state.model)
        pacing = self.phase.objective.facts.pacing
        pace = None if pacing is None else pacing.pace(state.slots.get(OBJECTIVE_SLOT), trainable)
        updated, updates = _apply_update(self.phase, self.optimizer, self.precision, state, sums, curvature, pace)
        updates, _ = split_by_rule(updates)
        update_norm = optax.global_norm(updates)
        finite = jnp.isfinite(sums.objective) & jnp.isfinite(norm) & jnp.isfinite(update_norm)
        for leaf in jax.tree.leaves(by_rule):
            finite &= jnp.all(jnp.isfinite(leaf))
        stats = StepStats(sums.objective, norm, finite, update_norm, gradient, split_by_rule(trainable)[0])
        verdicts = {guard.name: guard.judge(state.slots[guard.name], stats) for guard in self.guards}
        applies = functools.reduce(jnp.logical_and, (verdict.applies for verdict in verdicts.values()), finite)
        after = jax.tree.map(lambda new, old: jnp.where(applies, new, old), updated, state)
        skipped = state.guard.skipped + jnp.where(applies, 0, 1)
        always = (state.step + 1, skipped, after.slots | {name: verdict.slot for name, verdict in verdicts.items()})
        after = eqx.tree_at(lambda s: (s.step, s.guard.skipped, s.slots), after, always)
        others = group_schedules(self.phase.optimizer, self.phase.num_steps)
        position = state.guard.updates if pace is None or pace.position is None else pace.position
        rate = lambda schedule: guards.scaled(schedule(position), state.slots.get(guards.SLOT, {}))  # noqa: E731
        metrics = {f"train/{name}": metric.logged() for name, metric in sums.metrics.items()} | {
            OBJECTIVE: sums.objective,
            SKIPPED: skipped,
            GRADIENT_NORM: norm,
            UPDATE_NORM: update_norm,
            LEARNING_RATE: rate(self.schedule),
            **{f"{LEARNING_RATE}/{name}": rate(other) for name, other in others.items()},
        }
        for verdict in verdicts.values():
            metrics |= verdict.metrics
        watched: Numbers = {}
        if self.watch is not None:
            trees = {"grads": gradient, "updates": updates, "params": state.model}
            trees["opt_state"] = in_full(state.opt_state)
            watched = self.watch.measure(state.step + 1, trees, batch)
        return after, {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}, watched


def _apply_update(
    phase: Phase,
    optimizer: optax.GradientTransformationExtraArgs,
    precision: Precision,
    state: RunState,
    sums: Sums,
    curvature: Curvature,
    pace: Pace | None,
) -> tuple[RunState, Any]:
    """The state with the batch's update applied unconditionally, and the update."""
    trainable, frozen = phase.split(state.model)
    extra: dict[str, Any] = {"curvature": curvature}
    if guards.SLOT in state.slots:
        extra["controls"] = state.slots[guards.SLOT]
    if pace is not None:
        extra["pace"] = pace
    updates, opt_state = optimizer.update(sums.gradient, state.opt_state, trainable, **extra)
    trainable = optax.apply_updates(trainable, updates)
    count = state.guard.updates
    averages = {name: average.update(state.slots[name], trainable, count) for name, average in phase.averages.items()}
    slots = state.slots | averages
    if sums.slot is not None:
        compute = precision.cast_to_compute(trainable)
        slots[OBJECTIVE_SLOT] = phase.objective.update_slot(sums.slot, compute, count + 1)
    after = dataclasses.replace(
        state,
        model=eqx.combine(trainable, frozen, is_leaf=is_named),
        opt_state=opt_state,
        guard=UpdateCounts(updates=count + 1, skipped=state.guard.skipped),
        slots=slots,
    )
    return after, updates


def _curvature(
    phase: Phase, layout: Layout, precision: Precision, state: RunState, refs: Refs, batch: Any
) -> Curvature:
    """The objective on the first microbatch as a function of the trainable parameters, for second derivatives.

    This only builds functions. Nothing is computed unless the optimizer calls them.
    """
    objective, wide = phase.objective, precision.for_second_derivatives

    def first_microbatch_loss(trainable: Any) -> jax.Array:
        _, frozen = phase.split(state.model)
        first = jax.tree.map(lambda column: column[MICROBATCH, 0], batch, is_leaf=is_named)
        key = jax.random.fold_in(step_key(state), 0)
        with tracing(twice_differentiable=True):
            model = eqx.combine(wide.cast_to_compute(trainable), wide.cast_to_compute(frozen), is_leaf=is_named)
            slot = state.slots.get(OBJECTIVE_SLOT)
            first = objective.annotate(refs, first, slot, model)
            terms, _, _ = objective.terms(model, first, slot, key=key)
        return _total(terms, _denominators(objective, first))

    def gradient(trainable: Any) -> Any:
        return at_rest(jax.grad(first_microbatch_loss)(at_rest(trainable, layout)), layout)

    return Curvature(gradient, functools.partial(step_key, state))


def _denominators(objective: ObjectiveConfig, batch: Any) -> dict[str, jax.Array]:
    return {name: jnp.maximum(weight, 1.0) for name, weight in objective.weights(batch).items()}


def _total(terms: dict[str, Sum], denominators: dict[str, jax.Array]) -> jax.Array:
    return sum((term.total / denominators[name] for name, term in terms.items()), jnp.zeros(()))
