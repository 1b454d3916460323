"""Restores a checkpoint to arrays on the current mesh: finds, verifies, compares and reads it."""

import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import from_main, main_first, main_only
from jaxlm.core.sharding import Layout
from jaxlm.engine.checkpoint.integrity import DamagedError
from jaxlm.engine.checkpoint.manifest import CheckpointName, Cursor
from jaxlm.engine.checkpoint.store import Checkpoint, CheckpointFolder
from jaxlm.engine.checkpoint.writer import flat_arrays, manifest
from jaxlm.engine.state import shardings

T = TypeVar("T")
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
    for checkpoint in reversed(checkpoints):
        if _is_undamaged(lambda it=checkpoint: it, functools.partial(damages.__setitem__, checkpoint.name)):
            main_only(lambda: [_set_aside(folder, name, damage, log) for name, damage in damages.items()])
            return main_first(functools.partial(VerifiedCheckpoint.of, checkpoint))
    if checkpoints:
        lines = "\n".join(f"  {name}: {damage}" for name, damage in damages.items())
        raise NoUsableCheckpointError(
            f"every checkpoint in {folder.location} is damaged:\n{lines}\nNothing was loaded, and nothing"
            " was changed. To train from scratch, set another trainer.id or move the folder away"
        )
    return None


def newest_undamaged(
    folder: CheckpointFolder, names: Sequence[str], log: Callable[[str], None]
) -> VerifiedCheckpoint | None:
    """The last undamaged one of the run's checkpoints `names`; None if all are damaged. All processes must call this."""
    for name in reversed(names):
        find = functools.partial(folder.find, name)
        if _is_undamaged(find, lambda damage, name=name: log(f"checkpoint {name} is damaged: {damage}")):
            checkpoint = main_first(find)
            return main_first(functools.partial(VerifiedCheckpoint.of, checkpoint))
    return None


def _set_aside(folder: CheckpointFolder, name: str, damage: DamagedError, log: Callable[[str], None]) -> None:
    new_name = folder.set_aside(name)
    log(f"checkpoint {name} is damaged: {damage}. It was set aside as {new_name}; using the previous checkpoint")


def _is_undamaged(find: Callable[[], Checkpoint], if_damaged: Callable[[DamagedError], None]) -> bool:
    """Whether a checkpoint is undamaged. Process 0 reads it, and calls `if_damaged` if it is not."""

    def verify() -> bool:
        try:
            find().verify()
        except DamagedError as damage:
            if_damaged(damage)
            return False
        return True

    return from_main(verify)


def latest_complete(candidates: Sequence[Checkpoint], location: str, log: Callable[[str], None]) -> VerifiedCheckpoint:
    """Like `latest_valid` for another run, without changing anything in that run's folder."""
    for candidate in reversed(candidates):
        path = candidate.location
        if _is_undamaged(
            lambda candidate=candidate: candidate,
            lambda damage, path=path: log(f"{path} is damaged: {damage}. Trying the previous checkpoint"),
        ):
            return main_first(functools.partial(VerifiedCheckpoint.of, candidate))
    raise NoUsableCheckpointError(f"every checkpoint at {location} is damaged. Nothing was loaded")


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
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
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
