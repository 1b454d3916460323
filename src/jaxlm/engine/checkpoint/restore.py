"""From a checkpoint back to arrays on the current mesh: find, verify, compare, read."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import broadcast_from_main, main_first, main_only
from jaxlm.core.sharding import Layout
from jaxlm.engine.checkpoint.integrity import DamagedError
from jaxlm.engine.checkpoint.manager import flat_arrays, manifest
from jaxlm.engine.checkpoint.manifest import Cursor
from jaxlm.engine.checkpoint.store import Checkpoint, CheckpointFolder
from jaxlm.engine.state import shardings

T = TypeVar("T")
_MOST_SHOWN = 8


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A verified checkpoint.

    Attributes:
        checkpoint: itself.
        cursor: where its run stood.
    """

    checkpoint: Checkpoint
    cursor: Cursor

    @property
    def place(self) -> Path | str:
        """Where it lies: a path, or a URL."""
        return self.checkpoint.place

    def position(self) -> dict[str, Any]:
        """Where the data goes on, as `Batches.restore` takes it. Every process asks."""
        return json.loads(main_first(lambda: self.checkpoint.read("data/position.json")))


class NoUsableCheckpointError(Exception):
    """There are checkpoints, and none of them can be used. Training from scratch instead would hide the loss."""


def latest_valid(folder: CheckpointFolder, log: Callable[[str], None]) -> VerifiedCheckpoint | None:
    """The newest checkpoint in `folder` whose files are what was saved; damaged newer ones are set aside.

    Every process calls this and gets the same answer; process 0 does the reading.

    Raises:
        NothingUsableError: all of them are damaged.
    """
    num_damaged = 0
    while checkpoints := main_first(folder.checkpoints):
        newest = checkpoints[-1]
        if _verified(newest, lambda damage, name=newest.name: _put_aside(folder, name, damage, log)):
            return VerifiedCheckpoint(newest, main_first(newest.cursor))
        num_damaged += 1
    if num_damaged:
        raise NoUsableCheckpointError(
            f"all {num_damaged} checkpoints in {folder.place} are damaged (set aside as *.damaged). Nothing was loaded."
            " To train from the beginning, choose another trainer.id or move the folder away"
        )
    return None


def _put_aside(folder: CheckpointFolder, name: str, damage: DamagedError, log: Callable[[str], None]) -> None:
    aside = folder.set_aside(name)
    log(f"checkpoint {name} is damaged: {damage}. Set aside as {aside}; using the one before")


def _verified(checkpoint: Checkpoint, if_damaged: Callable[[DamagedError], None]) -> bool:
    """Whether a checkpoint is whole; process 0 reads it, and does what is to be done where it is not."""

    def verify() -> bool:
        try:
            checkpoint.verify()
        except DamagedError as damage:
            if_damaged(damage)
            return False
        return True

    return bool(broadcast_from_main(np.asarray(int(main_only(verify) or False))))


def latest_complete(candidates: Sequence[Checkpoint], place: str, log: Callable[[str], None]) -> VerifiedCheckpoint:
    """The newest whole one of the checkpoints at a place. It belongs to others: nothing is moved.

    Every process calls this and gets the same answer; process 0 does the reading.

    Raises:
        NothingUsableError: none of them is whole.
    """
    for candidate in reversed(candidates):
        at = candidate.place
        if _verified(candidate, lambda damage, at=at: log(f"{at} is damaged: {damage}. Trying the one before")):
            return VerifiedCheckpoint(candidate, main_first(candidate.cursor))
    raise NoUsableCheckpointError(f"all {len(candidates)} checkpoints at {place} are damaged. Nothing was loaded")


def restore(
    found: VerifiedCheckpoint,
    abstract: T,
    layout: Layout,
    *,
    prefix: str = "",
    fresh: Callable[[], T] | None = None,
    log: Callable[[str], None] = print,
    cast: bool = False,
) -> T:
    """Reads the arrays of `abstract` from a checkpoint, each straight to where it rests on the current mesh.

    Args:
        abstract: shapes and dtypes, from `jax.eval_shape`: a whole state, or a part of one.
        prefix: where that part stands in the saved state (`model`).
        fresh: makes what the checkpoint does not have; which that is, is shown, and so is what only the checkpoint has.
            Without it, both must have the same.
        cast: take other dtypes of floating-point numbers, too.

    Raises:
        ConfigError: the checkpoint's arrays are not those of `abstract`; names the first of them, with both shapes.
    """
    import orbax.checkpoint as ocp

    saved: dict[str, Any] = json.loads(found.checkpoint.read("run/manifest.json"))["leaves"]
    dotted = f"{prefix}." if prefix else ""
    expected = {dotted + path: leaf for path, leaf in manifest(abstract).items()}
    saved = {path: leaf for path, leaf in saved.items() if path.startswith(dotted)}
    if cast:
        saved = {path: _cast(leaf, expected[path]) if path in expected else leaf for path, leaf in saved.items()}
    if fresh is None:
        _compare(found.place, saved, expected)
    common = saved.keys() & expected.keys()
    _compare(found.place, *({path: leaves[path] for path in common} for leaves in (saved, expected)))
    places = flat_arrays(shardings(abstract, layout))
    target = {
        dotted + path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[path])
        for path, leaf in flat_arrays(abstract).items()
        if dotted + path in common
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arrays: Mapping[str, jax.Array] = reader.restore(
            found.checkpoint.arrays,
            args=ocp.args.PyTreeRestore(
                item=target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=bool(prefix) or fresh is not None,
            ),
        )
    loaded = {path.removeprefix(dotted): array for path, array in arrays.items()}
    if fresh is None:
        return tree.replace_leaves(abstract, loaded)
    _show_partial(found.place, sorted(expected.keys() - common), sorted(saved.keys() - common), log)
    made = fresh() if len(common) < len(expected) else abstract
    return tree.replace_leaves(made, flat_arrays(made) | loaded)


def _cast(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """The saved leaf as Orbax reads it into an array of the expected dtype."""
    floats = all(jax.numpy.issubdtype(leaf["dtype"], jax.numpy.floating) for leaf in (saved, expected))
    return {**saved, "dtype": expected["dtype"]} if floats else saved


def _show_partial(place: Path | str, missing: list[str], ignored: list[str], log: Callable[[str], None]) -> None:
    for leaves, what in ((missing, "not in it, and begin anew"), (ignored, "only in it, and are left out")):
        if leaves:
            log(f"checkpoint {place} in part: {len(leaves)} arrays are {what}: {', '.join(leaves)}")


def _compare(place: Path | str, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    differences = [
        f"  {leaf}: saved {_described(saved.get(leaf))}, this model {_described(expected.get(leaf))}"
        for leaf in _union(saved, expected)
        if saved.get(leaf) != expected.get(leaf)
    ]
    if differences:
        more = f"\n  ... and {len(differences) - _MOST_SHOWN} more" if len(differences) > _MOST_SHOWN else ""
        raise ConfigError(
            f"the checkpoint {place} belongs to another model:\n"
            + "\n".join(differences[:_MOST_SHOWN])
            + more
            + "\nGive the run the model it was saved with (run/config.yaml in the checkpoint), or another trainer.id;"
            " trainer.allow_partial_checkpoint: true leaves out arrays that only one of them has"
        )


def _union(a: Iterable[str], b: Iterable[str]) -> list[str]:
    return sorted({*a, *b})


def _described(leaf: Mapping[str, Any] | None) -> str:
    return "has none" if leaf is None else f"{leaf['dtype']}{leaf['shape']}"
