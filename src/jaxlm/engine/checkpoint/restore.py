"""Restores a checkpoint to arrays on the current mesh: finds, verifies, compares and reads it.

The objective's own part of a state may have another form than in the checkpoint: what an objective keeps between steps
follows from `objective` and `trainer.mp`, which may change while a run goes on.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxlm.core import guards, tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import from_main, main_first, main_only
from jaxlm.core.sharding import Layout
from jaxlm.core.stores import is_url
from jaxlm.engine.checkpoint.bucket import SCHEME, BucketFolder, bucket_checkpoints
from jaxlm.engine.checkpoint.local import LocalCheckpoint, LocalFolder
from jaxlm.engine.checkpoint.manifest import CHECKSUMS, CheckpointName, Cursor, DamagedError, checkpoints_below
from jaxlm.engine.checkpoint.staging import StagedFolder, staged_checkpoints
from jaxlm.engine.checkpoint.store import Checkpoint, CheckpointFolder
from jaxlm.engine.checkpoint.writer import flat_arrays, manifest
from jaxlm.engine.entry import StateBuilder
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import OBJECTIVE_SLOT, RunState, place_state, shardings, with_controls, without_controls

T = TypeVar("T")
Log = Callable[[str], None]


def resolve_folder(
    base: str, run_id: str | None, staging_dir: Path, *, delete_temporary: bool = True
) -> CheckpointFolder:
    """The folder of a run's checkpoints: `run_id` below the path or URL `base`, or `base` itself. Does not access it.

    Args:
        staging_dir: where checkpoints are staged for URLs that Orbax cannot write to.
        delete_temporary: whether a new checkpoint replaces the temporary ones.
    """
    if not is_url(base):
        return LocalFolder(Path(base, *filter(None, [run_id])), delete_temporary=delete_temporary)
    url = "/".join(filter(None, [base.rstrip("/"), run_id]))
    if url.startswith(SCHEME):
        return BucketFolder(url, delete_temporary=delete_temporary)
    return StagedFolder(url, staging_dir, delete_temporary=delete_temporary)


def resolve_checkpoints(location: str, staging_dir: Path, *, of_runs: bool = True) -> Sequence[Checkpoint]:
    """Checkpoints at a path or URL of a checkpoint, a run's folder or (with `of_runs`) a folder of runs, fewest steps first.

    For URLs that are staged, this downloads the newest checkpoint and returns only that. Raises `ConfigError` if the store
    cannot be read, or the staging folder cannot be written.
    """
    if location.startswith(SCHEME):
        return bucket_checkpoints(location, of_runs=of_runs)
    if is_url(location):
        paths = staged_checkpoints(location, staging_dir, of_runs=of_runs)
    else:
        paths = checkpoints_below(Path(location), of_runs=of_runs)
    return [LocalCheckpoint(path) for path in paths]


_OF_THE_MODEL = {"optimizer", "trainer.model_averaging"}  # their arrays have the shapes of the model's
_MOST_SHOWN = 8


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint whose files have been verified, and the step and phase at which it was saved."""

    checkpoint: Checkpoint
    cursor: Cursor

    @staticmethod
    def of(checkpoint: Checkpoint) -> "VerifiedCheckpoint":
        """A checkpoint that has been verified. Raises `ConfigError` if its name does not say where it was saved."""
        cursor, name = checkpoint.cursor(), CheckpointName.parse(checkpoint.name)
        if name is not None and (name.step, name.attempt) != (cursor.step, cursor.history.attempt):
            raise ConfigError(
                f"{checkpoint.location}: the folder is named {checkpoint.name}, but the checkpoint in it was saved as"
                f" {cursor.folder_name}, after {cursor.step} steps. Name the folder {cursor.folder_name} again, or move it"
                " away"
            )
        return VerifiedCheckpoint(checkpoint, cursor)

    @property
    def location(self) -> Path | str:
        return self.checkpoint.location

    def position(self) -> dict[str, Any]:
        """The data position, for `Batches.restore`. All processes must call this."""
        return json.loads(main_first(lambda: self.checkpoint.read("data/position.json")))


class NoUsableCheckpointError(Exception):
    """Checkpoints exist, but all of them are damaged. Training from scratch instead would hide the loss."""


def latest_valid(folder: CheckpointFolder, log: Callable[[str], None]) -> VerifiedCheckpoint | None:
    """The newest undamaged checkpoint of a run; sets damaged newer ones aside. None if there are no checkpoints.

    All processes must call this and get the same result. Process 0 reads the files. Raises `NoUsableCheckpointError` if all
    checkpoints are damaged. They keep their names then, so that the next start does not take the run for a new one.
    """
    damages: dict[str, DamagedError] = {}  # on process 0
    checkpoints = main_first(folder.checkpoints)

    def set_aside() -> None:
        for name, damage in damages.items():
            new_name = folder.set_aside(name)
            log(
                f"checkpoint {name} is damaged: {damage}. It was set aside as {new_name}; using the previous checkpoint"
            )

    found = _last_undamaged({one.name: lambda it=one: it for one in checkpoints}, damages.__setitem__)
    if found is not None:
        main_only(set_aside)
    elif checkpoints:
        lines = "\n".join(f"  {name}: {damage}" for name, damage in damages.items())
        raise NoUsableCheckpointError(
            f"every checkpoint in {folder.location} is damaged:\n{lines}\nNothing was loaded, and nothing"
            " was changed. To train from scratch, set another trainer.id or move the folder away"
        )
    return found


def newest_undamaged(
    folder: CheckpointFolder, names: Sequence[str], log: Callable[[str], None]
) -> VerifiedCheckpoint | None:
    """The last undamaged one of the run's checkpoints `names`; None if all are damaged. All processes must call this."""
    finds = {name: functools.partial(folder.find, name) for name in names}
    return _last_undamaged(finds, lambda name, damage: log(f"checkpoint {name} is damaged: {damage}"))


def _last_undamaged(
    finds: dict[str, Callable[[], Checkpoint]], if_damaged: Callable[[str, DamagedError], None]
) -> VerifiedCheckpoint | None:
    """The last checkpoint that is undamaged, of functions that find each. Process 0 reads them, and calls `if_damaged`."""

    def verify(name: str) -> bool:
        try:
            finds[name]().verify()
        except DamagedError as damage:
            if_damaged(name, damage)
            return False
        return True

    for name in reversed(finds):
        if from_main(functools.partial(verify, name)):
            return main_first(lambda: VerifiedCheckpoint.of(finds[name]()))  # noqa: B023 - called at once
    return None


def latest_complete(candidates: Sequence[Checkpoint], location: str, log: Callable[[str], None]) -> VerifiedCheckpoint:
    """Like `latest_valid` for another run, without changing anything in that run's folder."""
    finds = {str(candidate.location): lambda it=candidate: it for candidate in candidates}
    advice = "Trying the previous checkpoint"
    found = _last_undamaged(finds, lambda path, damage: log(f"{path} is damaged: {damage}. {advice}"))
    if found is None:
        raise NoUsableCheckpointError(f"every checkpoint at {location} is damaged. Nothing was loaded")
    return found


@contextlib.contextmanager
def while_it_exists(checkpoint: Checkpoint) -> Iterator[None]:
    """Raises `ConfigError` for an error that came because the run that had saved a checkpoint has replaced it meanwhile."""
    try:
        yield
    except (OSError, ValueError, DamagedError) as error:  # Orbax raises ValueError for a folder that is gone
        try:
            checkpoint.read(CHECKSUMS)
        except (FileNotFoundError, DamagedError):
            raise ConfigError(
                f"{checkpoint.location}: the checkpoint was deleted while it was read: the run that saves there has replaced"
                " it. Run the command again, or name a permanent checkpoint"
            ) from error
        raise


def restore(
    verified: VerifiedCheckpoint,
    abstract: T,
    layout: Layout,
    *,
    prefix: str = "",
    fresh: Callable[[], T] | None = None,
    log: Callable[[str], None] = print,
    cast: bool = False,
    unused: Collection[str] = (),
) -> T:
    """Reads the arrays of `abstract` from a checkpoint directly into their sharding on the current mesh.

    Args:
        abstract: shapes and dtypes from `jax.eval_shape`, of a whole state or a part of one.
        prefix: path of that part in the saved state (`model`).
        fresh: builds the arrays that the checkpoint does not have. Arrays that only one side has are logged. Without it,
            the checkpoint must have exactly the arrays of `abstract`.
        cast: also accept other floating-point dtypes.
        unused: paths of arrays in the checkpoint that are not read.

    Raises:
        ConfigError: the checkpoint's arrays differ from those of `abstract`; lists the first differences.
    """
    import orbax.checkpoint as ocp

    with while_it_exists(verified.checkpoint):
        saved: dict[str, Any] = json.loads(verified.checkpoint.read("run/manifest.json"))["leaves"]
    dotted = f"{prefix}." if prefix else ""
    expected = {dotted + path: leaf for path, leaf in manifest(abstract).items()}
    saved = {path: leaf for path, leaf in saved.items() if path.startswith(dotted) and path not in unused}
    for path in saved.keys() & expected.keys():
        # Earlier versions stored the optimizer's state in the dtype of the parameters.
        is_narrow_state = path.startswith("opt_state.") and saved[path]["dtype"] in ("bfloat16", "float16")
        if cast or is_narrow_state:
            saved[path] = _cast(saved[path], expected[path])
    if fresh is None:
        _compare(verified.location, saved, expected)
    common = saved.keys() & expected.keys()
    _compare(verified.location, *({path: leaves[path] for path in common} for leaves in (saved, expected)))
    array_shardings = flat_arrays(shardings(abstract, layout))
    target = {
        dotted + path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=array_shardings[path])
        for path, leaf in flat_arrays(abstract).items()
        if dotted + path in common
    }
    with while_it_exists(verified.checkpoint), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arrays: Mapping[str, jax.Array] = reader.restore(
            verified.checkpoint.arrays,
            args=ocp.args.PyTreeRestore(
                item=target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=bool(prefix or unused) or fresh is not None,
            ),
        )
    loaded = {path.removeprefix(dotted): array for path, array in arrays.items()}
    if fresh is None:
        return tree.replace_leaves(abstract, loaded)
    _log_partial(verified.location, sorted(expected.keys() - common), sorted(saved.keys() - common), log)
    base = fresh() if len(common) < len(expected) else abstract
    return tree.replace_leaves(base, flat_arrays(base) | loaded)


def _cast(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """The saved leaf with the expected dtype, if both are floating point; Orbax casts when it reads."""
    floats = all(jax.numpy.issubdtype(leaf["dtype"], jax.numpy.floating) for leaf in (saved, expected))
    return {**saved, "dtype": expected["dtype"]} if floats else saved


def _log_partial(location: Path | str, missing: list[str], ignored: list[str], log: Callable[[str], None]) -> None:
    for leaves, what in (
        (missing, "are not in the checkpoint and are newly initialized"),
        (ignored, "are only in the checkpoint and are ignored"),
    ):
        if leaves:
            log(f"partial load of checkpoint {location}: {len(leaves)} arrays {what}: {', '.join(leaves)}")


def _compare(location: Path | str, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    differing = [leaf for leaf in {*saved, *expected} if saved.get(leaf) != expected.get(leaf)]
    differing.sort(key=lambda leaf: (not leaf.startswith("model."), leaf))
    if not differing:
        return
    differing_keys = {_key_of(leaf, saved.get(leaf), expected.get(leaf)) for leaf in differing}
    keys = sorted(differing_keys - _OF_THE_MODEL if "model" in differing_keys else differing_keys)
    what, where = ("this model", "") if keys == ["model"] else ("this configuration", f" in {', '.join(keys)}")
    lines = [
        f"  {leaf}: checkpoint {_describe(saved.get(leaf))}, {what} {_describe(expected.get(leaf))}"
        for leaf in differing[:_MOST_SHOWN]
    ]
    if len(differing) > _MOST_SHOWN:
        lines.append(f"  ... and {len(differing) - _MOST_SHOWN} more")
    advice = "Set these keys as the checkpoint has them (in its run/config.yaml), or set another trainer.id."
    if saved.keys() != expected.keys():
        advice += " To ignore arrays that only one side has, set trainer.allow_partial_checkpoint: true"
    raise ConfigError("\n".join([f"the checkpoint {location} does not match {what}{where}:", *lines, advice]))


# Prefix of a leaf's path -> the section or key that decides whether the leaf exists, and its shape.
_KEYS = {
    "model.": "model",
    "opt_state.": "optimizer",
    "slots.objective.": "objective",
    "slots.loss_scale.": "trainer.mp",
    "slots.bad_steps.": "optimizer.skip_bad_steps",
    "slots.telemetry.": "optimizer.telemetry",
    "slots.": "trainer.model_averaging",
}


def _key_of(leaf: str, saved: Mapping[str, Any] | None, expected: Mapping[str, Any] | None) -> str:
    """The key whose change explains why a leaf differs."""
    if saved is not None and expected is not None and saved["shape"] == expected["shape"]:
        return "trainer.mp"
    return next((key for prefix, key in _KEYS.items() if leaf.startswith(prefix)), "model")


def _describe(leaf: Mapping[str, Any] | None) -> str:
    return "has no such array" if leaf is None else f"{leaf['dtype']}{leaf['shape']}"


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
        """Returns what a start says about the differences."""
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
    if saved.differs():
        for line in saved.describe(wanted):
            log(line)
        state = _with_wanted_slot(state, wanted, builder, phase, layout)
    return with_controls(state, phase.controls, layout)


def _with_wanted_slot(
    state: RunState, wanted: RunState, builder: StateBuilder, phase: Phase, layout: Layout
) -> RunState:
    """A state whose slot has the arrays of the checkpoint, with those that the objective wants."""
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
    if phase.objective.facts.holds_reference and of_parameters and checkpoint.cursor.step != phase.start:
        raise ConfigError(
            f"phase '{phase.name}': the objective holds the model from the start of the phase as its reference, which"
            f" {checkpoint.location} does not have: it was saved with another objective. Start a new run with"
            " trainer.initialize_from, add a phase with this objective, or set objective.reference to a model in refs"
        )
