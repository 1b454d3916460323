"""From a checkpoint back to arrays on the current mesh: find, verify, compare, read."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import barrier, broadcast_from_main, is_main_process
from jaxlm.core.sharding import Layout
from jaxlm.engine.checkpoint import Cursor, find_checkpoints, flat_arrays, manifest, read_cursor
from jaxlm.engine.integrity import DamagedError, verify
from jaxlm.engine.state import shardings

T = TypeVar("T")
_MOST_SHOWN = 8


@dataclass(frozen=True)
class Found:
    """A verified checkpoint.

    Attributes:
        path: its folder.
        cursor: where its run stood.
    """

    path: Path
    cursor: Cursor

    def position(self) -> dict[str, Any]:
        """Where the data goes on, as `Batches.restore` takes it."""
        return json.loads((self.path / "data" / "position.json").read_text())


class NothingUsableError(Exception):
    """There are checkpoints, and none of them can be used. Training from scratch instead would hide the loss."""


def newest_good(folder: Path, show: Callable[[str], None]) -> Found | None:
    """The newest checkpoint in `folder` whose files are what was saved; damaged newer ones are set aside.

    Every process calls this and gets the same answer; process 0 does the reading.

    Raises:
        NothingUsableError: all of them are damaged.
    """
    num_damaged = 0
    while True:
        checkpoints = find_checkpoints(folder)
        if not checkpoints:
            break
        newest = checkpoints[-1]
        if _is_whole(newest, show):
            return Found(newest, read_cursor(newest))
        num_damaged += 1
    if num_damaged:
        raise NothingUsableError(
            f"all {num_damaged} checkpoints in {folder} are damaged (set aside as *.damaged). Nothing was loaded. To"
            " train from the beginning, choose another trainer.id or move the folder away"
        )
    return None


def _is_whole(checkpoint: Path, show: Callable[[str], None]) -> bool:
    whole = 1
    if is_main_process():
        try:
            verify(checkpoint)
        except DamagedError as damage:
            whole = 0
            aside = _set_aside(checkpoint)
            show(f"checkpoint {checkpoint.name} is damaged: {damage}. Set aside as {aside.name}; using the one before")
    whole = int(broadcast_from_main(np.asarray(whole)))
    barrier("checkpoint verified")
    return bool(whole)


def _set_aside(checkpoint: Path) -> Path:
    for number in range(1, 1_000_000):
        aside = checkpoint.with_name(f"{checkpoint.name}.damaged" + (f".{number}" if number > 1 else ""))
        if not aside.exists():
            break
    os.rename(checkpoint, aside)
    return aside


def restore(found: Found, abstract: T, layout: Layout, *, prefix: str = "") -> T:
    """Reads the arrays of `abstract` from a checkpoint, each straight to where it rests on the current mesh.

    Args:
        abstract: shapes and dtypes, from `jax.eval_shape`: a whole state, or a part of one.
        prefix: where that part stands in the saved state (`model`).

    Raises:
        ConfigError: the checkpoint's arrays are not those of `abstract`; names the first of them, with both shapes.
    """
    import orbax.checkpoint as ocp

    saved: dict[str, dict[str, Any]] = json.loads((found.path / "run" / "manifest.json").read_text())["leaves"]
    dotted = f"{prefix}." if prefix else ""
    expected = {dotted + path: leaf for path, leaf in manifest(abstract).items()}
    _compare(found.path, {k: v for k, v in saved.items() if k.startswith(dotted)}, expected)
    places = flat_arrays(shardings(abstract, layout))
    target = {
        dotted + path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[path])
        for path, leaf in flat_arrays(abstract).items()
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arrays: Mapping[str, jax.Array] = reader.restore(
            found.path.absolute() / "state",
            args=ocp.args.PyTreeRestore(
                item=target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=bool(prefix),
            ),
        )
    return tree.replace_leaves(abstract, {path.removeprefix(dotted): array for path, array in arrays.items()})


def _compare(path: Path, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    differences = [
        f"  {leaf}: saved {_described(saved.get(leaf))}, this model {_described(expected.get(leaf))}"
        for leaf in _union(saved, expected)
        if saved.get(leaf) != expected.get(leaf)
    ]
    if differences:
        more = f"\n  ... and {len(differences) - _MOST_SHOWN} more" if len(differences) > _MOST_SHOWN else ""
        raise ConfigError(
            f"the checkpoint {path} belongs to another model:\n"
            + "\n".join(differences[:_MOST_SHOWN])
            + more
            + "\nGive the run the model it was saved with (run/config.yaml in the checkpoint), or another trainer.id"
        )


def _union(a: Iterable[str], b: Iterable[str]) -> list[str]:
    return sorted({*a, *b})


def _described(leaf: Mapping[str, Any] | None) -> str:
    return "has none" if leaf is None else f"{leaf['dtype']}{leaf['shape']}"
