"""How the state at the start of a phase is made: surgery (with what it measures first), trainable mask, optimizer.

    (previous state or weights, references, measurements, files, key) -> state

The structure of the state follows from the configuration alone. Tracing an entry on shapes gives the structure that a
checkpoint of the phase must have, without the references, the data and the files that the values come from.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jaxlm.core.imports import gc_paused

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import guards, tree
from jaxlm.core.axes import MICROBATCH
from jaxlm.core.errors import ConfigError, did_you_mean
from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout
from jaxlm.core.values.logged import LayerTable
from jaxlm.data.base import Batches
from jaxlm.engine.phases import Phase, with_phase_ends
from jaxlm.engine.state import (
    OBJECTIVE_SLOT,
    RunState,
    UpdateCounts,
    build_state,
    in_device_memory,
    place_state,
    shardings,
)
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.optim.groups import with_schedules_restarted
from jaxlm.surgery.base import SurgeryConfig

T = TypeVar("T")
Leaves = Mapping[str, hax.NamedArray]
OpenBatches = Callable[[], Batches]


def calibrate(
    surgery: SurgeryConfig, model: LanguageModel, precision: Precision, layout: Layout, open_batches: OpenBatches
) -> Any:
    """Sums what `wants.measure` returns over the surgery's calibration batches. None if it is not calibrated.

    Args:
        model: the model that the surgery will change, in the dtype of storage. It keeps its buffers.
        open_batches: opens the phase's batches at its first step.
    """
    wants = surgery.wants
    if not wants.num_batches:
        return None
    own = wants.measure
    assert own is not None, "a surgery that wants batches measures them"

    def measure(model: LanguageModel, part: Any) -> Any:
        return own(precision.cast_to_compute(model), part.supervised())

    def over_microbatches(model: LanguageModel, batch: Any) -> Any:
        first = jax.tree.map(lambda column: column[MICROBATCH, 0], batch, is_leaf=tree.is_named)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(measure, model, first))
        add = lambda sums, part: jax.tree.map(jnp.add, sums, measure(model, part))  # noqa: E731
        return hax.fold(add, MICROBATCH)(zeros, batch)

    with contextlib.closing(open_batches()) as batches:
        sums, program = None, None
        for batch in itertools.islice(iter(lambda: next(batches), None), wants.num_batches):
            if program is None:
                abstract = jax.eval_shape(over_microbatches, model, batch)
                program = jax.jit(over_microbatches, out_shardings=shardings(abstract, layout))
            new = program(model, batch)
            sums = new if sums is None else jax.tree.map(jnp.add, sums, new)
            jax.block_until_ready(sums)  # simulated devices deadlock if many programs are in flight
    return sums


# Folded into the run's key first, so that no two uses share randomness.
_INIT, _SURGERY, _STEPS = 0, 1, 2
_VALUES = 1  # folded into a surgery's key for `fill`


class Given(eqx.Module):
    """Holds what the surgeries of a phase make values of, besides the model and a random key.

    Attributes:
        leaves: of each surgery, leaf path -> the value that replaces the one made by the surgery, read from files.
        refs: the references that surgeries read, by name; empty leaves their values as they are without.
        sums: of each surgery, what `Wants.measure` returned, summed over the calibration batches; empty if none was
            calibrated.
    """

    leaves: Sequence[Leaves] = ()
    refs: Mapping[str, LanguageModel] = eqx.field(default_factory=dict)
    sums: Sequence[Any] = ()

    def sums_of(self, number: int) -> Any:
        """The sums of one of the surgeries; None if it was not calibrated."""
        return self.sums[number] if number < len(self.sums) else None


class Carried(eqx.Module):
    """Holds what a phase takes over from the end of the previous one, besides the model (`PhaseEntry.state`)."""

    opt_state: Any
    updates: jax.Array
    slots: dict[str, Any]


class Before(eqx.Module):
    """Describes what a phase is entered from.

    Attributes:
        model: at the end of the previous phase; for the first phase, the initial model.
        skipped: int32, updates skipped in the run so far.
        carried: None if the optimizer starts anew.
        num_applied: number of the phase's surgeries that the model has been through already, when it was read.
    """

    model: LanguageModel
    skipped: jax.Array | int = 0
    carried: Carried | None = None
    num_applied: int = eqx.field(static=True, default=0)

    @staticmethod
    def of(state: RunState, phase: Phase) -> "Before":
        """The end of a phase, as `phase` takes it over."""
        carried = Carried(state.opt_state, state.guard.updates, state.slots) if phase.carries_optimizer else None
        return Before(state.model, state.guard.skipped, carried)


@dataclass(frozen=True)
class PhaseEntry:
    """The start of a phase. All methods can be traced.

    Attributes:
        previous: the phase before; None for the first one.
        key: makes the run's random key for a use.
    """

    phase: Phase
    previous: Phase | None
    precision: Precision
    key: Callable[[int], jax.Array]

    def state(self, before: Before, given: Given | None = None) -> RunState:
        """The state at the start of the phase. Args: given: None leaves out values that need more than the model."""
        phase, model = self.phase, self.model(before.model, given, first=before.num_applied)
        trainable, _ = phase.split(model)
        slot = phase.objective.init_slot(self.precision.cast_to_compute(trainable))
        slots = {} if slot is None else {OBJECTIVE_SLOT: slot}
        slots |= {guard.name: guard.init_slot() for guard in phase.guards(self.precision)}
        slots |= {name: average.init_slot(trainable) for name, average in phase.averages.items()}
        if initial := phase.controls:
            slots[guards.SLOT] = {name: jnp.asarray(value, jnp.float32) for name, value in initial.items()}
        state = RunState(
            step=jnp.asarray(phase.start, jnp.int32),
            key=self.key(_STEPS),
            model=model,
            opt_state=phase.transformation_of(trainable).init(trainable),
            guard=UpdateCounts(updates=jnp.zeros((), jnp.int32), skipped=jnp.asarray(before.skipped, jnp.int32)),
            slots=slots,
        )
        return state if before.carried is None else self._with_carried(state, before.carried, given)

    def model(
        self, model: LanguageModel, given: Given | None = None, *, first: int = 0, until: int | None = None
    ) -> LanguageModel:
        """The model after the phase's surgeries. Args: first, until: only those with numbers in this range."""
        for number in range(first, len(self.phase.surgeries) if until is None else until):
            model = self.after_surgery(model, number, given)
        return self.precision.cast_to_params(model)

    def after_surgery(self, before: LanguageModel, number: int, given: Given | None = None) -> LanguageModel:
        """The model after one of the phase's surgeries. Args: before: the model after those in front of it."""
        surgery = self.phase.surgeries[number]
        key = jax.random.fold_in(jax.random.fold_in(self.key(_SURGERY), self.phase.index), number)
        model = surgery.apply(before, key=key)
        if given is None:
            return model
        sums = given.sums_of(number)
        if sums is not None or (surgery.wants.references and given.refs):
            model = surgery.fill(model, before, refs=given.refs, sums=sums, key=jax.random.fold_in(key, _VALUES))
        leaves = given.leaves[number] if given.leaves else {}
        return tree.map_leaves(lambda path, leaf: leaves.get(path, leaf), model)

    def _with_carried(self, fresh: RunState, carried: Carried, given: Given | None) -> RunState:
        """The state with what goes on from the previous phase: moments and counts of the leaves that both train, statistics
        of the guards and, if the schedule goes on too, its position, averages and the objective's state.
        """
        assert self.previous is not None
        continues_schedule = self.phase.schedule_start is not None
        opt_state, old_slots = carried.opt_state, carried.slots
        for number, surgery in enumerate(self.phase.surgeries):
            sums = None if given is None else given.sums_of(number)
            opt_state, old_slots = _map_models(functools.partial(surgery.moved, sums=sums), (opt_state, old_slots))
        opt_state = _taken(fresh.opt_state, opt_state)
        if not continues_schedule:
            opt_state = with_schedules_restarted(opt_state)
        names = {guard.name for guard in self.phase.guards(self.precision)}
        if continues_schedule:
            names |= set(self.phase.averages)
            if self.phase.objective == self.previous.objective and not self.phase.objective.facts.holds_reference:
                names.add(OBJECTIVE_SLOT)
        slots = {
            name: _taken(slot, old_slots[name]) if name in names & old_slots.keys() else slot
            for name, slot in fresh.slots.items()
        }
        updates = carried.updates if continues_schedule else fresh.guard.updates
        return replace(fresh, opt_state=opt_state, guard=replace(fresh.guard, updates=updates), slots=slots)


def _map_models(change: Callable[[Any], Any], opt_state: Any) -> Any:
    """Changes the parts of an optimizer state that have the model's structure, such as moments."""
    is_model = lambda node: isinstance(node, LanguageModel)  # noqa: E731
    return jax.tree.map(lambda node: change(node) if is_model(node) else node, opt_state, is_leaf=is_model)


def _taken(fresh: T, carried: Any) -> T:
    """The tree with the leaves of another one that have the same path, axes and dtype."""
    old = dict(tree.leaves(carried))
    form = lambda leaf: (leaf.axes if tree.is_named(leaf) else leaf.shape, leaf.dtype)  # noqa: E731

    def taken(path: str, leaf: Any) -> Any:
        return old[path] if path in old and form(old[path]) == form(leaf) else leaf

    return tree.map_leaves(taken, fresh)


@dataclass(eq=False)
class StateBuilder:
    """Builds a run's models and states: the initial model, and the state at the start of each phase.

    Attributes:
        model: config of the initial model.
        token_leaves: path -> value of the leaves of the initial model that were computed from the training tokens.
    """

    model: ModelConfig
    Vocab: hax.Axis
    seed: int
    precision: Precision
    phases: Sequence[Phase] = ()
    token_leaves: Mapping[str, np.ndarray] = field(default_factory=dict)
    _abstract: dict[int, RunState] = field(default_factory=dict, init=False)
    _abstract_models: dict[tuple[int, int], LanguageModel] = field(default_factory=dict, init=False)

    def entry(self, phase: Phase) -> PhaseEntry:
        """The start of a phase."""
        previous = self.phases[phase.index - 1] if phase.index else None
        return PhaseEntry(phase, previous, self.precision, self._key)

    def initial_model(self) -> LanguageModel:
        """The model before the first phase's surgeries. Traceable."""
        model = self.precision.cast_to_params(self.model.build(self.Vocab, key=self._key(_INIT)))
        values = self.token_leaves

        def replaced(path: str, leaf: Any) -> Any:
            return hax.NamedArray(jnp.asarray(values[path], leaf.dtype), leaf.axes) if path in values else leaf

        return tree.map_leaves(replaced, model)

    def with_vocabulary(self, size: int) -> "StateBuilder":
        """A builder of the same models with another number of tokens."""
        return replace(self, Vocab=self.Vocab.resize(size), token_leaves={})

    def with_phase_ends(self, ends: Sequence[int]) -> "StateBuilder":
        """The same builder, with the steps after which its first phases really ended. The other phases follow them."""
        return replace(self, phases=with_phase_ends(self.phases, ends))

    def with_token_leaves(self, leaves: Mapping[str, np.ndarray]) -> "StateBuilder":
        """The same builder for an initial model with these leaves, by path."""
        return replace(self, token_leaves=leaves)

    @functools.cached_property
    def abstract_initial_model(self) -> LanguageModel:
        """Shapes and dtypes of `initial_model`."""
        return jax.eval_shape(self.initial_model)

    def surgeries_until(self, phase: Phase) -> tuple[SurgeryConfig, ...]:
        """The surgeries of all phases up to and including this one, in order."""
        return tuple(surgery for earlier in self.phases[: phase.index + 1] for surgery in earlier.surgeries)

    def initial_leaves(self, phase: Phase) -> list[Leaves]:
        """The leaves that the phase's surgeries bring themselves, as host arrays in the dtype of storage.

        Raises:
            ConfigError: they cannot be read, or do not fit the model.
        """
        config = self.phases[phase.index - 1].model if phase.index else self.model
        brought: list[Leaves] = []
        for number, surgery in enumerate(phase.surgeries):
            model, config = self._abstract_model_after(phase, number + 1), surgery.changed(config)
            leaves: Mapping[str, Any] = _readable(surgery.wants.leaves, f"surgery.{number}", model, config)
            if not leaves:
                brought.append({})
                continue
            stored = dict(tree.leaves(jax.eval_shape(self.precision.cast_to_params, model)))
            _check_fit(leaves, stored, f"surgery.{number}")
            brought.append({p: hax.NamedArray(a.astype(stored[p].dtype), stored[p].axes) for p, a in leaves.items()})
        return brought

    def abstract_state(self, phase: Phase) -> RunState:
        """Shapes and dtypes of the state in a phase: traces the surgeries of all phases up to it.

        Cached per phase, because a start needs it several times.
        """
        index = phase.index
        if index not in self._abstract:
            num_applied = len(phase.surgeries)
            before = Before(self._abstract_model_after(phase, num_applied), num_applied=num_applied)
            self._abstract[index] = jax.eval_shape(self.entry(phase).state, before)
        return self._abstract[index]

    def check_references(self, phase: Phase, refs: Mapping[str, LanguageModel]) -> None:
        """Raises `ConfigError` if the phase's surgeries cannot read references of these shapes."""
        jax.eval_shape(self.entry(phase).model, self._abstract_model_before(phase), Given(refs=refs))

    def _abstract_model_before(self, phase: Phase) -> LanguageModel:
        """Shapes and dtypes of the model that the phase's surgeries change."""
        if phase.index == 0:
            return self.abstract_initial_model
        return self.abstract_state(self.phases[phase.index - 1]).model

    def _abstract_model_after(self, phase: Phase, num_surgeries: int) -> LanguageModel:
        """The same after the first of the phase's surgeries. Cached, so that a start traces each surgery once."""
        if num_surgeries == 0:
            return self._abstract_model_before(phase)
        key = phase.index, num_surgeries
        if key not in self._abstract_models:
            apply = functools.partial(self.entry(phase).after_surgery, number=num_surgeries - 1)
            before = self._abstract_model_after(phase, num_surgeries - 1)
            self._abstract_models[key] = jax.eval_shape(apply, before)
        return self._abstract_models[key]

    def initial_state(self, phase: Phase, given: Given | None = None) -> RunState:
        """The state at the start of a phase as if the previous phases had not trained. Traceable."""
        model = self.initial_model()
        for earlier in self.phases[: phase.index]:
            model = self.entry(earlier).model(model)
        return self.entry(phase).state(Before(model), given)

    def _key(self, use: int) -> jax.Array:
        return jax.random.fold_in(jax.random.PRNGKey(self.seed), use)


@gc_paused()
def _readable(read: Callable[..., T], path: str, *arguments: Any) -> T:
    try:
        return read(*arguments)
    except OSError as error:
        raise ConfigError(f"{path}: {error.filename or 'a file'} cannot be read ({error.strerror or error})") from error


def _check_fit(leaves: Mapping[str, Any], stored: Mapping[str, hax.NamedArray], path: str) -> None:
    """Raises `ConfigError` if an array that a surgery brings has no place in the model, or another shape."""
    for name, array in leaves.items():
        if name not in stored:
            raise ConfigError(f"{path}: the array '{name}' has no place in the model.{did_you_mean(name, stored)}")
        sizes = {axis.name: axis.size for axis in stored[name].axes}
        if tuple(array.shape) != tuple(sizes.values()):
            raise ConfigError(
                f"{path}: the array '{name}' has shape {tuple(array.shape)}, but the model's has the axes {sizes}"
            )


def enter_phase(
    state_builder: StateBuilder,
    phase: Phase,
    layout: Layout,
    previous: RunState | None,
    weights: LanguageModel | None = None,
    *,
    num_applied: int = 0,
    refs: Mapping[str, LanguageModel] | None = None,
    open_batches: OpenBatches | None = None,
    report: Callable[[LayerTable], None] = lambda decided: None,
) -> Callable[[], RunState]:
    """Returns a function that builds the state at the start of a phase. Until it is called, its program compiles in a thread.

    The buffers of `previous` and `weights` are donated.

    Args:
        previous: the state at the end of the previous phase; None builds the model from the run's seed.
        weights: the model to start the first phase with, instead of one built from the seed.
        num_applied: number of the phase's surgeries that `weights` have been through.
        refs: the references that the surgeries read, by name.
        open_batches: opens the batches of the phase's data at its first step; without them, surgeries are not calibrated and
            keep the values that they have without.
        report: receives what each surgery decides from its measurements, if it decides something.
    """
    entry, abstract, refs = state_builder.entry(phase), state_builder.abstract_state(phase), refs or {}
    leaves = state_builder.initial_leaves(phase)
    leaves = jax.device_put(leaves, shardings(leaves, layout))
    if not any(surgery.wants.num_batches for surgery in phase.surgeries):
        open_batches = None
    if previous is not None:
        before = Before.of(previous, phase)
    elif weights is not None or open_batches is not None:
        initial = lambda: place_state(state_builder.initial_model, state_builder.abstract_initial_model, layout)  # noqa: E731
        before = Before(initial() if weights is None else weights, jnp.zeros((), jnp.int32), None, num_applied)
    else:
        make = lambda leaves, refs: state_builder.initial_state(phase, Given(leaves, refs))  # noqa: E731
        return build_state(make, abstract, layout, leaves, kept=(refs,))
    sums: Sequence[Any] = ()
    if open_batches is not None:
        sums = _calibrated(entry, before, layout, Given(leaves, refs), open_batches, report)

    def make_state(before: Before, leaves: Sequence[Leaves], refs: Mapping[str, LanguageModel], sums: Any) -> RunState:
        return entry.state(in_device_memory(before), Given(leaves, refs, sums))

    build = build_state(make_state, abstract, layout, before, leaves, kept=(refs, sums))

    def enter() -> RunState:
        # Free what the program does not donate, which callers that still hold the state would keep alive.
        if previous is not None and not phase.carries_optimizer:
            _delete((previous.opt_state, previous.slots))
        state = build()
        _delete(before.model)  # arrays that no array of the new model has replaced
        return state

    return enter


def _delete(arrays: Any) -> None:
    for array in jax.tree.leaves(arrays):
        if not array.is_deleted():
            array.delete()


def _calibrated(
    entry: PhaseEntry,
    before: Before,
    layout: Layout,
    given: Given,
    open_batches: OpenBatches,
    report: Callable[[LayerTable], None],
) -> tuple[Any, ...]:
    """`Given.sums`: each surgery is calibrated on the model that those in front of it have made."""
    model, first = before.model, before.num_applied
    sums: list[Any] = [None] * first
    for number, surgery in enumerate(entry.phase.surgeries[first:], first):
        so_far = functools.partial(entry.model, first=first, until=number)
        changed = jax.jit(so_far)(model, replace(given, sums=tuple(sums))) if number > first else model
        sums.append(calibrate(surgery, changed, entry.precision, layout, open_batches))
        decided = None if sums[-1] is None else surgery.wants.describe(changed, sums[-1])
        if decided is not None:
            report(decided)
    return tuple(sums)
