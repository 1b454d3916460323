"""Checkpoints on disk: complete or invisible.

A checkpoint is written to a hidden folder, sealed with checksums, and only then renamed to its name:

    <folder>/step-N            N updates done
    <folder>/step-N-<phase>    N updates done and <phase> entered (its surgery done, nothing of it trained)
        state/                 Orbax: every array of the state by its path
        run/                   cursor.json, manifest.json, config.yaml, tokenizer/
        data/position.json     where the data goes on
        checksums.json         of all of these
"""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from jaxlm.core import tree
from jaxlm.core.runtime import is_main_process, main_only
from jaxlm.engine.integrity import seal
from jaxlm.engine.naming import find_checkpoints
from jaxlm.engine.orbax_noise import silence_repeated_errors
from jaxlm.engine.state import RunState

_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Cursor:
    """Where a run stands.

    Attributes:
        step: updates done.
        phase: index of the phase that the state belongs to.
        phase_name: its name.
        entering: whether the phase has just been entered (its number of updates alone would not tell the checkpoint
            from the one at the end of the phase before).
        temporary: whether the next checkpoint replaces this one.
    """

    step: int
    phase: int
    phase_name: str
    entering: bool
    temporary: bool

    @property
    def folder_name(self) -> str:
        """`step-N`, or `step-N-<phase>` on entry of a later phase."""
        return f"step-{self.step}" + (f"-{self.phase_name}" if self.entering and self.phase > 0 else "")


class SaveError(Exception):
    """A checkpoint could not be saved. Finished checkpoints are untouched."""

    @classmethod
    def because(cls, folder: Path, error: BaseException) -> "SaveError":
        """With what to do, where the cause tells it. TensorStore names the system's error only in its text."""
        full = os.strerror(errno.ENOSPC) in str(error)
        advice = " The finished checkpoints are whole: make room, and start the same command again." if full else ""
        return cls(f"saving a checkpoint to {folder} failed: {error}.{advice}")


def read_cursor(checkpoint: Path) -> Cursor:
    """The cursor that was saved with a checkpoint."""
    return Cursor(**json.loads((checkpoint / "run" / "cursor.json").read_text()))


def _is_temporary(checkpoint: Path) -> bool:
    try:
        return read_cursor(checkpoint).temporary
    except (OSError, ValueError, TypeError):
        return False  # what cannot be read is not ours to delete


def flat_arrays(state: Any) -> dict[str, Any]:
    """Every array of a state by its dotted path: the form in which Orbax saves it."""
    return {path: tree.raw(leaf) for path, leaf in tree.leaves(state)}


def manifest(state: Any) -> dict[str, dict[str, Any]]:
    """Path -> shape and dtype of every array: what a rebuilt tree must match."""
    return {p: {"shape": list(a.shape), "dtype": str(a.dtype)} for p, a in flat_arrays(state).items()}


class CheckpointWriter:
    """Saves states of one run in the background.

    Attributes:
        folder: where the checkpoints of the run go.
    """

    def __init__(
        self,
        folder: Path,
        run_files: Mapping[str, bytes],
        *,
        delete_temporary: bool = True,
        publish: Callable[[Path], None] = lambda _: None,
    ):
        """Args:
        run_files: what goes into `run/` of every checkpoint (resolved config, tokenizer), by relative path.
        delete_temporary: whether a new checkpoint replaces the temporary ones.
        publish: called with each finished checkpoint, in the background.
        """
        import orbax.checkpoint as ocp

        self.folder = folder.absolute()
        self._run_files = dict(run_files)
        self._delete_temporary = delete_temporary
        self._publish = publish
        silence_repeated_errors()
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True))
        self._save_args = ocp.args.PyTreeSave
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def prepare(self) -> None:
        """Makes the folder, shows that it can be written, and removes what earlier runs left unfinished.

        Raises:
            SaveError: the folder cannot be written to.
        """
        main_only(self._prepare)

    def _prepare(self) -> None:
        probe = self.folder / f"probe{_UNFINISHED}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"jaxlm")
        except OSError as error:
            raise SaveError(f"the checkpoint folder {self.folder} cannot be written to: {error}") from error
        for path in self.folder.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def save(self, state: RunState, cursor: Cursor, position: Mapping[str, Any]) -> None:
        """Copies the state off the devices and returns; the rest happens in the background.

        Every process calls this at the same step. A save that is still running is waited for first.

        Args:
            position: of the data, as `Batches.state()` says.

        Raises:
            SaveError: this save or the one before failed.
        """
        self.wait()
        final = self.folder / cursor.folder_name
        unfinished = self.folder / f"{cursor.folder_name}{_UNFINISHED}"
        try:
            main_only(lambda: self._write_small_files(unfinished, state, cursor, position))
            self._orbax.save(unfinished / "state", args=self._save_args(flat_arrays(state)))
        except (OSError, ValueError) as error:  # ValueError is how tensorstore says that the disk is full
            raise SaveError.because(self.folder, error) from error
        self._thread = threading.Thread(target=self._commit, args=(unfinished, final), name="checkpoint-commit")
        self._thread.start()

    def wait(self) -> None:
        """Blocks until the last save is finished. Raises what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise SaveError.because(self.folder, error) from error

    def check(self) -> None:
        """Raises what went wrong in a save that has ended; does not wait for one that has not."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def _write_small_files(self, folder: Path, state: RunState, cursor: Cursor, position: Mapping[str, Any]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        versions = {"jax": jax.__version__, "saved_at_unix_s": time.time()}
        files = {f"run/{name}": content for name, content in self._run_files.items()} | {
            "run/cursor.json": json.dumps(asdict(cursor)).encode(),
            "run/manifest.json": json.dumps({"leaves": manifest(state), **versions}).encode(),
            "data/position.json": json.dumps(dict(position)).encode(),
        }
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _commit(self, unfinished: Path, final: Path) -> None:
        # What fails here must reach the training loop, whatever it is: `wait` and `check` raise it there.
        try:
            self._orbax.wait_until_finished()
            if not is_main_process():
                return
            seal(unfinished)
            superseded = [p for p in find_checkpoints(self.folder) if self._delete_temporary and _is_temporary(p)]
            if final.exists():
                self._remove(final)
            os.rename(unfinished, final)
            for path in superseded:
                self._remove(path)
            self._publish(final)
        except BaseException as error:
            self._error = error

    def _remove(self, path: Path) -> None:
        """Deletes a checkpoint so that no half-deleted one is ever visible."""
        if path.exists():
            doomed = path.with_name(path.name + _UNFINISHED)
            os.rename(path, doomed)
            shutil.rmtree(doomed)
