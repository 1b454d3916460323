"""Writes one state at a time to a `CheckpointFolder`, in a thread of its own, and knows how the saves are going.

The processes of a run tell each other whether their part of a save worked with an `Exchange`: at a barrier, the others would
wait for a process that has failed until the barrier's timeout.
"""

import asyncio
import contextlib
import errno
import functools
import itertools
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from jaxlm.core import tree
from jaxlm.core.errors import counted
from jaxlm.core.exchange import Exchange, exchange_about
from jaxlm.core.runtime import is_main_process
from jaxlm.core.stores import AT_START_S, BRIEFLY_S, WHILE_TRAINING_S, retried
from jaxlm.engine.checkpoint.lease import LeaseCheck, LeaseLostError
from jaxlm.engine.checkpoint.manifest import Cursor
from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.checkpoint.store import ARRAYS, CURSOR, CheckpointFolder, SaveError
from jaxlm.engine.state import RunState

T = TypeVar("T")

_FIRST_PAUSE_S = 5.0
_PATIENCE_S = 5.0  # until a save that is waited for is mentioned


class SaveHealth:
    """Counts saves that fail, says so, and decides when to try again.

    Attributes:
        is_owed: whether a permanent checkpoint could not be saved, and none has been since.
    """

    def __init__(
        self,
        policy: CheckpointerConfig,
        newest: str | None,
        log: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ):
        """Args: newest: name of the checkpoint from which the run starts; None if it is new."""
        self.is_owed = False
        self._retry_for_s = policy.retry_for.total_seconds()
        self._most_s = policy.save_interval.total_seconds()
        self._newest = newest
        self._log = log
        self._now = now
        self._saved_at = now()
        self._failing_since: float | None = None
        self._next_at = 0.0
        self._streak = self._total = 0

    @property
    def is_failing(self) -> bool:
        return self._streak > 0

    def allowed(self, pauses_s: Sequence[float]) -> list[float]:
        """The first of the pauses between the tries of a save that blocks: those that are over within `retry_for`.

        The same on all processes, which must try equally often.
        """
        ends = itertools.accumulate(pauses_s)
        return [pause for pause, end in zip(pauses_s, ends, strict=True) if end <= self._retry_for_s]

    def retry_due(self) -> bool:
        """Tells whether the pause after the last failure is over."""
        return self._now() >= self._next_at

    def saved(self, name: str) -> None:
        if self._streak:
            since = self._now() - (self._failing_since or 0.0)
            self._log(
                f"checkpoints are saved again: {name} ({counted(self._streak, 'save')} failed in the last {since:.0f} s)"
            )
        self.is_owed = False
        self._newest, self._saved_at = name, self._now()
        self._streak, self._failing_since, self._next_at = 0, None, 0.0

    def failed(self, name: str, error: SaveError, *, permanent: bool, pause_s: float | None = None) -> None:
        """A save has failed: says what, and what follows.

        Args:
            pause_s: the pause before the same state is saved again, because nothing else can be; None if training goes on.

        Raises:
            SaveError: saves have been failing for longer than `retry_for`.
        """
        now = self._now()
        self._streak, self._total = self._streak + 1, self._total + 1
        self.is_owed |= permanent
        if self._failing_since is None:
            self._failing_since = now
        if pause_s is None and now - self._failing_since >= self._retry_for_s:
            raise error
        wait_s = min(_FIRST_PAUSE_S * 2 ** (self._streak - 1), self._most_s) if pause_s is None else pause_s
        self._next_at = now + wait_s
        newest = f"the newest finished checkpoint is {self._newest}" if self._newest else "there is no checkpoint yet"
        self._log(
            f"WARNING: {name} was not saved: {error.reason}; {newest}. {self._plan(wait_s, now, pause_s is None)}"
        )

    def metrics(self) -> dict[str, float]:
        """Number of saves that have failed since this start, and seconds since the last one that was finished."""
        return {
            "throughput/failed_saves": float(self._total),
            "throughput/time_since_save": self._now() - self._saved_at,
        }

    def _plan(self, wait_s: float, now: float, goes_on: bool) -> str:
        if not goes_on:
            return f"The next try is in {wait_s:g} s"
        left_s = max(0.0, self._retry_for_s - (now - (self._failing_since or now)))
        made_up = "; that checkpoint is kept for good, because a permanent one is missing" if self.is_owed else ""
        return (
            f"Training goes on. The next try is in {wait_s:g} s{made_up}. Failed so far: {self._streak}; the run ends if"
            f" saves still fail in {left_s:.0f} s (trainer.checkpointer.retry_for)"
        )


def flat_arrays(state: Any) -> dict[str, Any]:
    """Dotted path -> array, for every array of a state. This is the form in which Orbax saves it."""
    return {path: tree.raw(leaf) for path, leaf in tree.leaves(state)}


def manifest(state: Any) -> dict[str, dict[str, Any]]:
    """Path -> shape and dtype of every array, which a rebuilt tree must match."""
    return {p: {"shape": list(a.shape), "dtype": str(a.dtype)} for p, a in flat_arrays(state).items()}


class CheckpointWriter:
    """Writes the checkpoints of one run in the background, one at a time.

    A save that fails changes nothing: what it has written is removed, now or later. All processes learn of the failure.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        run_files: dict[str, bytes],
        health: SaveHealth,
        log: Callable[[str], None],
        check_lease: LeaseCheck,
        before_commit: Sequence[Callable[[], None]] = (),
        progress: Callable[[], None] = lambda: None,
    ):
        """Args:
        run_files: relative path -> content of the files in `run/` of every checkpoint (config, tokenizer). It may grow.
        check_lease: called in the thread before the folder is changed. It may ask a store.
        before_commit: called in the thread, so that what they flush is on disk before the checkpoint is visible.
        progress: called when a save that blocks is retried: the watchdog must not take its pauses for a hang.
        """
        import orbax.checkpoint as ocp

        self.health = health
        self._folder = folder
        self.run_files = run_files
        self._log = log
        self._check_lease = check_lease
        self._before_commit = before_commit
        self._progress = progress
        silence_repeated_errors()
        # Not an `AsyncCheckpointer`: its barriers would wait for a process that has failed (docs/design/0016).
        self._orbax = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
        self._save_args = ocp.args.PyTreeSave
        self._numbers = itertools.count()  # of saves: all processes number them alike
        self._cursor: Cursor | None = None  # of the save whose outcome has not been looked at
        self._thread = threading.Thread()
        self._error: SaveError | None = None
        self._lost: LeaseLostError | None = None

    @property
    def has_failed(self) -> bool:
        """Tells whether the last save, which has been waited for, has failed."""
        return self._error is not None

    @property
    def is_busy(self) -> bool:
        """Tells whether a state is being written."""
        return self._thread.is_alive()

    def start(self, state: RunState, cursor: Cursor, position: Mapping[str, Any]) -> None:
        """Copies the state off the devices and returns; the rest happens in the background.

        All processes must call this at the same step, and `wait` before it. `position` is the data position, from
        `Batches.state()`.
        """
        assert self._cursor is None, "the last save has not been waited for"
        name = cursor.folder_name
        files = self._small_files(state, cursor, position)
        others = exchange_about("saves", next(self._numbers))
        save = _Save(name, files, flat_arrays(state), _orbax_path(self._folder.arrays(name)), others)
        self._cursor = cursor
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint")
        self._thread.start()
        save.copied.result()

    def save(
        self, state: RunState, cursor: Cursor, position: Mapping[str, Any], pauses_s: Sequence[float] = WHILE_TRAINING_S
    ) -> None:
        """Saves a state and blocks until that is done. A save that fails is repeated.

        Args:
            pauses_s: seconds to wait before each further try, as far as `retry_for` allows.

        Raises:
            SaveError: the last try failed, too.
        """
        self.wait()
        for pause in (*self.health.allowed(pauses_s), None):
            self.start(state, cursor, position)
            if (error := self.wait(pause_s=pause, is_last=pause is None)) is None:
                return
            if pause is None:
                raise error
            time.sleep(pause)
            self._progress()

    def wait(self, *, pause_s: float | None = None, is_last: bool = False) -> SaveError | None:
        """Blocks until the last save is finished. Returns why it failed; None if it did not, or if that is known.

        Args:
            pause_s: see `SaveHealth.failed`.
            is_last: whether the caller ends the run if it failed.

        Raises:
            SaveError: saves have been failing for too long.
            LeaseLostError: another start of the run has taken the folder.
        """
        self.join()
        cursor, self._cursor = self._cursor, None
        if cursor is None:
            return None
        if self._lost is not None:
            raise self._lost
        if self._error is None:
            self.health.saved(cursor.folder_name)
        elif not is_last:
            self.health.failed(cursor.folder_name, self._error, permanent=not cursor.temporary, pause_s=pause_s)
        return self._error

    def join(self) -> None:
        """Blocks until the last save is finished, whether it works or fails."""
        if self._cursor is None:
            return
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            self._log(f"waiting for the save of {self._cursor.folder_name}, which is still being written")
            self._thread.join()

    def close(self) -> None:
        """Waits for the last save, and removes what failed saves have left behind."""
        self.wait()
        if is_main_process():
            with contextlib.suppress(Exception):  # the next start does it
                self._while_held(self._check_lease)
                retried(self._folder.tidy, AT_START_S)

    def _small_files(self, state: RunState, cursor: Cursor, position: Mapping[str, Any]) -> dict[str, bytes]:
        versions = {"jax": jax.__version__, "saved_at_unix_s": time.time()}
        return {f"run/{name}": content for name, content in self.run_files.items()} | {
            CURSOR: cursor.to_json(),
            f"{ARRAYS}/commit_success.txt": b"",  # in a bucket, Orbax's own readers ask for it
            "run/manifest.json": json.dumps({"leaves": manifest(state), **versions}).encode(),
            "data/position.json": json.dumps(dict(position)).encode(),
        }

    def _run(self, save: "_Save") -> None:
        self._error = self._cannot("the thread that saves has failed")
        try:
            writes = self._copy(save)
        except BaseException as error:  # of the devices, not of the storage: it belongs to the training thread
            save.begun.cancel()
            save.copied.set_exception(error)
            return
        save.copied.set_result(None)
        try:
            self._begin(save)
            failure = _failure_of(lambda: [write.result() for write in writes])  # of this process
            failure = _concluded(save, failure, lambda failures: self._commit(save, failures))
        except Exception as error:  # the coordination service is gone
            failure = _text(error)
        self._error = self._cannot(failure) if failure else None

    def _copy(self, save: "_Save") -> Sequence[Any]:
        """Copies the arrays to this machine. Returns their writes, which begin once the checkpoint is begun."""
        folder = _ArraysFolder(save.folder, save.begun)
        writes = _run_to_end(self._orbax.async_save(folder, args=self._save_args(dict(save.arrays))))
        save.arrays.clear()  # their buffers belong to the next step
        return writes or ()

    def _begin(self, save: "_Save") -> None:
        failure = _failure_of(lambda: self._begin_folder(save)) if is_main_process() else ""
        if failure := _concluded(save, failure, lambda failures: failures[0]):
            save.begun.set_exception(OSError(failure))
        else:
            save.begun.set_result(None)

    def _begin_folder(self, save: "_Save") -> None:
        self._while_held(self._check_lease)  # the other start may have finished a checkpoint of this name
        self._folder.begin(save.name, save.files)

    def _while_held(self, act: Callable[[], object]) -> None:
        try:
            act()
        except LeaseLostError as lost:
            self._lost = lost
            raise

    def _commit(self, save: "_Save", failures: Sequence[str]) -> str:
        """Makes the checkpoint visible, if all processes have written their part. Returns why it is not."""
        of_others = (f"process {number}: {text}" for number, text in enumerate(failures) if text)
        failure = failures[0] or next(of_others, "") or _failure_of(lambda: self._make_visible(save))
        if failure and self._lost is None:
            _failure_of(self._tidy)
        return failure

    def _tidy(self) -> None:
        """Removes what failed saves have left behind. Raises `LeaseLostError` if that may be another start's."""
        self._while_held(self._check_lease)
        self._folder.tidy()

    def _make_visible(self, save: "_Save") -> None:
        retried(lambda: self._merge(save.folder), BRIEFLY_S)
        for act in (self._check_lease, *self._before_commit):
            self._while_held(act)
        self._folder.commit(save.name)

    def _merge(self, folder: Any) -> None:
        """Merges the parts of the processes. Orbax skips this with a warning if it cannot list them."""
        self._orbax.finalize(folder)
        if not (folder / "manifest.ocdbt").exists():
            raise OSError(errno.EIO, "the parts of the checkpoint could not be listed", str(folder))

    def _cannot(self, failure: str) -> SaveError:
        return SaveError.because(self._folder.location, failure)


@dataclass(frozen=True)
class _Save:
    """One save.

    Attributes:
        files: relative path -> content of the small files.
        arrays: path -> array; empty once they are copied.
        folder: where Orbax writes the arrays.
        others: what the processes tell each other about this save; None for a single process.
        copied: done when the training thread may go on.
        begun: done when the arrays may be written.
    """

    name: str
    files: Mapping[str, bytes]
    arrays: dict[str, Any]
    folder: Any
    others: Exchange | None
    copied: Future[None] = field(default_factory=Future)
    begun: Future[None] = field(default_factory=Future)


def _concluded(save: _Save, failure: str, conclusion: Callable[[Sequence[str]], str]) -> str:
    """What process 0 concludes of why the processes have failed; empty stands for no failure."""
    if save.others is None:
        return conclusion([failure])
    conclude = lambda said: conclusion([text.decode() for text in said]).encode()  # noqa: E731
    return save.others.conclude(failure.encode(), conclude).decode()


class _ArraysFolder:
    """Orbax's `PathAwaitingCreation`: nothing is written to the folder until the checkpoint is begun."""

    def __init__(self, path: Any, begun: Future[None]):
        self.path = path
        self._begun = begun

    def __truediv__(self, other: str) -> "_ArraysFolder":
        return _ArraysFolder(self.path / other, self._begun)

    async def await_creation(self) -> Any:
        await asyncio.wrap_future(self._begun)
        return self.path


def _orbax_path(path: str) -> Any:
    """A path of the kind that Orbax takes, with `await_creation`.

    Two of Orbax's threads put it in the place of an `_ArraysFolder` at the same time. One of them may have found the folder,
    but then awaits what the other one has put there.
    """
    from etils import epath

    return _awaitable(type(epath.Path()))(path)


@functools.cache  # caches of Python keep paths, and so would keep a class for each save
def _awaitable(kind: type) -> Any:
    async def await_creation(self: Any) -> Any:
        return self

    return type("OrbaxPath", (kind,), {"await_creation": await_creation})


def _run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, which fails now and then if Orbax's threads do the same (its set of tasks is not thread-safe)."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def _failure_of(act: Callable[[], Any]) -> str:
    """Calls `act`. Returns why it failed; empty if it did not."""
    try:
        act()
    except Exception as error:  # Orbax, TensorStore and the clients of stores raise types of their own
        return _text(error)
    return ""


def _text(error: BaseException) -> str:
    if isinstance(error, SaveError):
        return error.reason
    if isinstance(error, (OSError, ValueError)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"


def silence_repeated_errors() -> None:
    """Silences the tracebacks of Orbax's threads and tasks: the save says what the first of them failed with. Also those of
    writes that end after a failed save closed the event loop.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_not_repeated)
    if sys.unraisablehook is not _unraisable:
        sys.unraisablehook = _unraisable


def _is_not_repeated(record: logging.LogRecord) -> bool:
    if not record.exc_info:
        return True
    # What asyncio reports of a task that is no longer awaited names the task's code, or has been raised in it.
    raised_in = [frame.filename for frame in traceback.extract_tb(record.exc_info[2])]
    return not any("orbax" in text for text in (record.pathname, record.getMessage(), *raised_in))


def _unraisable(unraisable: Any) -> None:
    if not (isinstance(unraisable.exc_value, RuntimeError) and "Event loop is closed" in str(unraisable.exc_value)):
        sys.__unraisablehook__(unraisable)
