"""Restores a whole state, in which the objective's own part may have another form than in the checkpoint.

What an objective keeps between steps follows from `objective` and `trainer.mp`, which may change while a run goes on.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxlm.core import guards, tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout
from jaxlm.engine.checkpoint.restore import VerifiedCheckpoint, restore
from jaxlm.engine.entry import StateBuilder
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import OBJECTIVE_SLOT, RunState, place_state, with_controls, without_controls

Log = Callable[[str], None]
_PREFIX = f"slots.{OBJECTIVE_SLOT}."


@dataclass(frozen=True)
class _SavedSlot:
    """The arrays of an objective's slot that a checkpoint has, and the run needs.

    Attributes:
        dtypes: path in the slot -> dtype in the checkpoint.
        unused: paths in the state that only the checkpoint has.
        missing: paths in the slot that only the run has.
        cast: paths in the slot whose dtype differs.
    """

    dtypes: Mapping[str, str]
    unused: frozenset[str]
    missing: frozenset[str]
    cast: frozenset[str]

    @staticmethod
    def of(leaves: Mapping[str, Mapping[str, Any]], wanted: RunState) -> "_SavedSlot":
        saved = {path.removeprefix(_PREFIX): leaf for path, leaf in leaves.items() if path.startswith(_PREFIX)}
        needed = dict(tree.leaves(wanted.slots.get(OBJECTIVE_SLOT)))
        dtypes, cast = {}, set()
        for path in saved.keys() & needed.keys():
            ours, theirs = (jax.numpy.dtype(leaf) for leaf in (needed[path].dtype, saved[path]["dtype"]))
            floats = all(jax.numpy.issubdtype(dtype, jax.numpy.floating) for dtype in (ours, theirs))
            dtypes[path] = str(theirs if floats else ours)
            cast |= {path} if floats and ours != theirs else set()
        unused = frozenset(_PREFIX + path for path in saved.keys() - needed.keys())
        return _SavedSlot(dtypes, unused, frozenset(needed.keys() - saved.keys()), frozenset(cast))

    def stored(self, state: RunState) -> RunState:
        """A state with the slot as the checkpoint has it. Traceable."""
        slot = dict(tree.leaves(state.slots.get(OBJECTIVE_SLOT)))
        stored = {path: slot[path].astype(dtype) for path, dtype in self.dtypes.items()}
        return _with_slot(state, stored or None)

    def differs(self) -> bool:
        return bool(self.unused or self.missing or self.cast)

    def describe(self, wanted: RunState) -> list[str]:
        """What a start says about the differences."""
        lines, slot = [], dict(tree.leaves(wanted.slots.get(OBJECTIVE_SLOT)))
        if self.cast:
            path = min(self.cast)
            lines.append(
                f"objective: {len(self.cast)} arrays of its state are cast from {self.dtypes[path]} to {slot[path].dtype},"
                " as trainer.mp and the objective ask for"
            )
        if self.missing:
            lines.append(f"objective: {len(self.missing)} arrays of its state are not in the checkpoint and start anew")
        if self.unused:
            lines.append(f"objective: {len(self.unused)} arrays that the checkpoint's objective kept are not needed")
        return lines


def restore_state(
    checkpoint: VerifiedCheckpoint,
    builder: StateBuilder,
    phase: Phase,
    layout: Layout,
    log: Log,
    *,
    allow_partial: bool = False,
) -> RunState:
    """Restores the whole state of a checkpoint in a phase. Call it inside `layout.use()`.

    Controls have their values from the start of the phase: the history says which are in effect (`Control.begin`).
    The objective's arrays are cast, dropped, or built again. An initial reference is built again only at the start of the
    phase: later, the model has changed.

    Args:
        allow_partial: whether other arrays may be missing (`trainer.allow_partial_checkpoint`).

    Raises:
        ConfigError: the checkpoint does not match the configuration.
    """
    state = _restored(checkpoint, builder, phase, layout, log, allow_partial=allow_partial)
    return with_controls(state, phase.controls, layout)


def _restored(
    checkpoint: VerifiedCheckpoint,
    builder: StateBuilder,
    phase: Phase,
    layout: Layout,
    log: Log,
    *,
    allow_partial: bool,
) -> RunState:
    """The same without the controls."""
    wanted = without_controls(builder.abstract_state(phase))
    leaves = json.loads(checkpoint.checkpoint.read("run/manifest.json"))["leaves"]
    saved = _SavedSlot.of(leaves, wanted)
    _check_has_reference(checkpoint, phase, saved, wanted)
    abstract = jax.eval_shape(saved.stored, wanted) if saved.differs() else wanted
    fresh = None
    if allow_partial:
        make = lambda: without_controls(builder.initial_state(phase))  # noqa: E731
        fresh = lambda: place_state(lambda: saved.stored(make()) if saved.differs() else make(), abstract, layout)  # noqa: E731
    unused = saved.unused | {path for path in leaves if path.startswith(f"slots.{guards.SLOT}.")}
    state = restore(checkpoint, abstract, layout, fresh=fresh, log=log, unused=unused)
    if not saved.differs():
        return state
    for line in saved.describe(wanted):
        log(line)
    if OBJECTIVE_SLOT not in wanted.slots:
        return _with_slot(state, None)
    kept = state.slots.get(OBJECTIVE_SLOT, {})

    def settle(model: Any, kept: Mapping[str, Any]) -> tuple[Any, Any]:
        trainable, _ = phase.split(model)
        begun = phase.objective.init_slot(builder.precision.cast_to_compute(trainable))
        slot = tree.map_leaves(lambda path, leaf: kept[path].astype(leaf.dtype) if path in kept else leaf, begun)
        return model, slot

    model, slot = place_state(settle, (wanted.model, wanted.slots[OBJECTIVE_SLOT]), layout, state.model, kept)
    return _with_slot(dataclasses.replace(state, model=model), slot)


def _with_slot(state: RunState, slot: Any) -> RunState:
    others = {name: other for name, other in state.slots.items() if name != OBJECTIVE_SLOT}
    return dataclasses.replace(state, slots=others if slot is None else {**others, OBJECTIVE_SLOT: slot})


def _check_has_reference(checkpoint: VerifiedCheckpoint, phase: Phase, saved: _SavedSlot, wanted: RunState) -> None:
    """Raises `ConfigError` if the objective would compare the model with a later one than that of the phase's start."""
    slot = dict(tree.leaves(wanted.slots.get(OBJECTIVE_SLOT)))
    of_parameters = any(tree.is_named(slot[path]) for path in saved.missing)  # other arrays are numbers of its own
    if phase.objective.holds_reference and of_parameters and checkpoint.cursor.step != phase.start:
        raise ConfigError(
            f"phase '{phase.name}': the objective holds the model from the start of the phase as its reference, which"
            f" {checkpoint.location} does not have: it was saved with another objective. Start a new run with"
            " trainer.initialize_from, add a phase with this objective, or set objective.reference to a model in refs"
        )
