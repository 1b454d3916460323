"""Saves states in the background to a `CheckpointFolder`."""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxlm.core import tree
from jaxlm.core.runtime import is_main_process, main_only
from jaxlm.engine.checkpoint.manifest import Cursor, History
from jaxlm.engine.checkpoint.policy import CheckpointerConfig, SaveClock, is_permanent
from jaxlm.engine.checkpoint.store import CURSOR, CheckpointFolder, SaveError
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState

BEST, BEFORE_STREAK = "best", "before_streak"
"""Purposes of pins: the phase's best evaluation, and the newest checkpoint from before a streak of skipped updates."""


def flat_arrays(state: Any) -> dict[str, Any]:
    """Dotted path -> array, for every array of a state. This is the form in which Orbax saves it."""
    return {path: tree.raw(leaf) for path, leaf in tree.leaves(state)}


def manifest(state: Any) -> dict[str, dict[str, Any]]:
    """Path -> shape and dtype of every array, which a rebuilt tree must match."""
    return {p: {"shape": list(a.shape), "dtype": str(a.dtype)} for p, a in flat_arrays(state).items()}


class CheckpointWriter:
    """Writes the checkpoints of one run in the background."""

    def __init__(self, folder: CheckpointFolder, run_files: Mapping[str, bytes]):
        """Args: run_files: relative path -> content of the files in `run/` of every checkpoint (config, tokenizer)."""
        import orbax.checkpoint as ocp

        self._folder = folder
        self._run_files = dict(run_files)
        silence_repeated_errors()
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True))
        self._save_args = ocp.args.PyTreeSave
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: RunState, cursor: Cursor, position: Mapping[str, Any]) -> None:
        """Copies the state off the devices and returns; the rest happens in the background.

        All processes must call this at the same step. It first waits for a save that is still running. `position` is the
        data position, from `Batches.state()`. Raises `SaveError` if this save or the previous one failed.
        """
        self.wait()
        name = cursor.folder_name
        try:
            main_only(lambda: self._folder.begin(name, self._small_files(state, cursor, position)))
            self._orbax.save(self._folder.arrays(name), args=self._save_args(flat_arrays(state)))
        except self._folder.write_errors as error:
            raise SaveError.because(self._folder.location, error) from error
        self._thread = threading.Thread(target=self._commit, args=(name,), name="checkpoint-commit")
        self._thread.start()

    def wait(self) -> None:
        """Blocks until the last save is finished. Raises `SaveError` if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise SaveError.because(self._folder.location, error) from error

    def check(self) -> None:
        """Raises `SaveError` if a finished save failed. Does not block."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def _small_files(self, state: RunState, cursor: Cursor, position: Mapping[str, Any]) -> dict[str, bytes]:
        versions = {"jax": jax.__version__, "saved_at_unix_s": time.time()}
        return {f"run/{name}": content for name, content in self._run_files.items()} | {
            CURSOR: cursor.to_json(),
            "run/manifest.json": json.dumps({"leaves": manifest(state), **versions}).encode(),
            "data/position.json": json.dumps(dict(position)).encode(),
        }

    def _commit(self, name: str) -> None:
        # Any failure here must reach the training loop: `wait` and `check` raise it there.
        try:
            self._orbax.wait_until_finished()
            if is_main_process():
                self._folder.commit(name)
        except BaseException as error:
            self._error = error


class Saver:
    """Decides which checkpoints to save in a phase, and saves them.

    Attributes:
        history: the run's history, which every checkpoint contains.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        policy: CheckpointerConfig,
        phase: Phase,
        before_save: Sequence[Callable[[], None]],
        history: History,
        resumed: str | None = None,
    ):
        """Args:
        before_save: called before each save, so that what they flush is on disk before the checkpoint is visible.
        resumed: name of the checkpoint that the phase continues from; None if it is entered.
        """
        self.history = history
        self._writer = writer
        self._policy = policy
        self._phase = phase
        self._before_save = before_save
        self._clock = SaveClock(policy.save_interval)
        self._last_saved: int | None = None
        self._before_streak = history.pins.get(BEFORE_STREAK, resumed)
        self._best_step: int | None = None

    def due_by_clock(self) -> bool:
        """Whether a temporary checkpoint is due by process 0's clock; False on every other process."""
        self._writer.check()
        return is_main_process() and self._clock.due()

    def due_by_step(self, step: int) -> bool:
        """Whether the retention rules or a request of this step save a checkpoint."""
        return is_permanent(self._policy.keep, step) or step == self._best_step

    def save_best(self, step: int) -> None:
        """Requests a checkpoint of this step, and pins it until the next such request or the end of the phase."""
        self._best_step = step

    def save(self, state: RunState, step: int, position: Mapping[str, Any], *, forced: bool) -> None:
        """Starts saving the state after `step`, unless that was just done. `forced`: the phase or the run ends here."""
        if step == self._last_saved:
            return
        permanent = is_permanent(self._policy.keep, step) or (forced and step == self._phase.end)
        self._write(state, step, position, entering=False, temporary=not permanent)

    def save_end(self, state: RunState, step: int, position: Mapping[str, Any]) -> None:
        """Starts saving the state with which the phase ends, permanently."""
        self._best_step = None
        self._write(state, step, position, entering=False, temporary=False)

    def save_entry(self, state: RunState, position: Mapping[str, Any]) -> None:
        """Saves the state at the start of the phase and blocks until it is written."""
        self._write(state, self._phase.start, position, entering=True, temporary=True)
        self._writer.wait()

    def save_rewound(self, state: RunState, cursor: Cursor, position: Mapping[str, Any]) -> None:
        """Saves the state to which the run went back, and blocks until it is written: from here on, a start resumes there.

        Args:
            cursor: the cursor of the checkpoint that the state was loaded from.
            position: the data position after the skipped batches.
        """
        self._write(state, cursor.step, position, entering=cursor.entering, temporary=True)
        self._writer.wait()

    def _write(
        self, state: RunState, step: int, position: Mapping[str, Any], *, entering: bool, temporary: bool
    ) -> None:
        for flush in self._before_save:
            flush()
        cursor = Cursor(step, self._phase.index, self._phase.name, entering, temporary, self.history)
        self.history = replace(self.history, pins=self._pins(cursor))
        self._writer.save(state, replace(cursor, history=self.history), position)
        self._last_saved = step
        self._clock.reset()

    def _pins(self, cursor: Cursor) -> dict[str, str]:
        """What to pin once the checkpoint at `cursor` is saved."""
        name = cursor.folder_name
        pins = {purpose: pinned for purpose, pinned in self.history.pins.items() if purpose != BEFORE_STREAK}
        if cursor.step == self._best_step:
            pins[BEST] = name
        if not self.history.bad_steps:
            self._before_streak = name
        elif self._before_streak is not None:
            pins[BEFORE_STREAK] = self._before_streak
        return pins


def silence_repeated_errors() -> None:
    """Silences the tracebacks of Orbax's threads, and those of writes that end after a failed save closed the event loop."""
    logging.getLogger("absl").addFilter(_is_not_repeated)
    if sys.unraisablehook is not _unraisable:
        sys.unraisablehook = _unraisable


def _is_not_repeated(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _unraisable(unraisable: Any) -> None:
    if not (isinstance(unraisable.exc_value, RuntimeError) and "Event loop is closed" in str(unraisable.exc_value)):
        sys.__unraisablehook__(unraisable)
