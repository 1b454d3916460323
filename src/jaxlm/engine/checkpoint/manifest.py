"""Checkpoint names, the cursor (the step and phase of a checkpoint), and the checksums that detect a damaged one."""

import errno
import hashlib
import json
import operator
import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from jaxlm.core.safe_io import SMALL, UnreadableFileError, fsync, open_regular, read_bytes
from jaxlm.core.stores import BRIEFLY_S, retried

T = TypeVar("T")

CHECKSUMS = "checksums.json"
_NO_FILE = (errno.ENOENT, errno.ELOOP)  # a link to nothing or to itself, or a file that was deleted since it was listed
SHA256, MD5 = "sha256", "md5"
"""Kinds of checksums: the one that jaxlm computes, and the one that object stores keep for every object."""


class DamagedError(Exception):
    """A checkpoint's files differ from what was saved; the message names the file and the difference."""


def seal(folder: Path) -> None:
    """Writes `checksums.json` for all files below `folder`, and syncs every file to disk.

    A folder with this file is complete.
    """
    names = _files(folder)
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: retried(lambda: _digest(folder / name, sync=True), BRIEFLY_S), names)
        sums = dict(zip(names, digests, strict=True))
    retried(lambda: (folder / CHECKSUMS).write_text(json.dumps(sums, indent=1)), BRIEFLY_S)
    for path in (folder / CHECKSUMS, folder):
        retried(partial(fsync, path), BRIEFLY_S)


def verify(folder: Path, below: str = "") -> None:
    """Reads every file below `folder` and compares it with `checksums.json`. For `below` and errors, see `compare`."""
    compare(lambda: read_bytes(folder / CHECKSUMS, SMALL), _files(folder), lambda n, k: _digest(folder / n, k), below)


def compare(
    read_sums: Callable[[], bytes], existing: Collection[str], digest: Callable[[str, str], str], below: str = ""
) -> None:
    """Compares files with their saved `checksums.json`, which has a SHA-256, or `md5:` and an MD5, for each of them.

    Args:
        read_sums: returns the content of `checksums.json`. Only files that do not exist count as damage; other errors of
            this and of `digest`, such as a store that does not respond, are passed on.
        existing: relative paths of the files that exist.
        digest: returns a file's checksum, given its path and the kind of checksum.
        below: check only files whose relative path starts with this.

    Raises:
        DamagedError: a file is missing, extra or different.
    """
    expected = {name: value for name, value in read_checksums(read_sums).items() if name.startswith(below)}
    existing = {name for name in existing if name.startswith(below)}
    for name in sorted(existing.symmetric_difference(expected)):
        raise DamagedError(f"{name} is {'not part of the checkpoint' if name in existing else 'missing'}")
    digests = {name: _parse_digest(value) for name, value in expected.items()}
    with ThreadPoolExecutor() as pool:
        actuals = pool.map(lambda name: digest(name, digests[name][0]), digests)
        try:
            for (name, (kind, value)), actual in zip(digests.items(), actuals, strict=True):
                if value != actual:
                    raise DamagedError(
                        f"{name} is not what was saved ({kind} {actual[:12]}..., expected {value[:12]}...)"
                    )
        except UnreadableFileError as error:
            raise DamagedError(f"{error.filename}: {error.strerror}") from error
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            raise DamagedError(f"{error.filename or error} is missing") from error


def read_checksums(read: Callable[[], bytes]) -> dict[str, str]:
    """Relative path -> checksum of each file of a checkpoint.

    Args:
        read: see `read_sums` of `compare`.

    Raises:
        DamagedError: there is no `checksums.json`, or it is not one. A path that leaves the checkpoint's folder is refused,
            because files are written to these paths.
    """
    try:
        sums = json.loads(read())
        assert isinstance(sums, dict)
        assert all(isinstance(value, str) for value in sums.values())
    except (FileNotFoundError, ValueError, RecursionError, AssertionError) as error:
        raise DamagedError(f"cannot read {CHECKSUMS} ({error})") from error
    for name in sums:
        if posixpath.isabs(name) or ".." in name.split("/"):
            raise DamagedError(f"{CHECKSUMS} names '{name}', which is outside the checkpoint")
    return sums


def digest_of(file: BufferedReader, kind: str) -> str:
    """The checksum of an open file, in hexadecimal."""
    return hashlib.file_digest(file, partial(hashlib.new, kind, usedforsecurity=False)).hexdigest()


def _parse_digest(value: str) -> tuple[str, str]:
    kind, separator, digest = value.rpartition(":")
    if separator and kind != MD5:
        raise DamagedError(f"{CHECKSUMS} contains checksums of an unknown kind, '{kind}'")
    return (kind or SHA256, digest)


def _files(folder: Path) -> list[str]:
    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error  # `rglob` would pass over what it cannot list

    paths = (Path(path, name) for path, _, files in os.walk(folder, onerror=fail) for name in files)
    names = (path.relative_to(folder).as_posix() for path in paths)
    return sorted(name for name in names if name != CHECKSUMS)


def _digest(path: Path, kind: str = SHA256, *, sync: bool = False) -> str:
    with open_regular(path) as file:
        digest = digest_of(file, kind)
    if sync:
        fsync(path)
    return digest


@dataclass(frozen=True)
class History:
    """Records what a run has done that its configuration does not say. The cursor has it, without fields at their defaults.

    Attributes:
        attempt: how often the run went back to an earlier checkpoint.
        abandoned_steps: number of steps after those checkpoints that were done in vain.
        phase_ends: steps after which the phases really ended, up to the last one that ended early; empty if none did.
        controllers: name of a controller -> what it remembers in this phase, as JSON (`engine/control.py`); without those
            that remember nothing.
        pins: purpose -> name of a checkpoint that is not deleted while it is listed here.
        went_back_to: name of the checkpoint to which the configuration last made the run go back; None if it never did.
        abandoned: names of the checkpoints after that one, until they are set aside.
        rewinds: key that made the run go back, or limits it -> how often; without the attempts of earlier versions.
        hooks_run: number of hooks that have run after this step, if the next one has failed; None if none has.
    """

    attempt: int = 0
    abandoned_steps: int = 0
    phase_ends: tuple[int, ...] = ()
    controllers: Mapping[str, Any] = field(default_factory=dict)
    pins: Mapping[str, str] = field(default_factory=dict)
    went_back_to: str | None = None
    abandoned: tuple[str, ...] = ()
    rewinds: Mapping[str, int] = field(default_factory=dict)
    hooks_run: int | None = None

    def in_next_phase(self) -> "History":
        """The history at the start of the next phase."""
        return replace(self, controllers={}, pins={}, abandoned=())

    def in_another_run(self) -> "History":
        """The history of a run that starts from this run's state."""
        return History(phase_ends=self.phase_ends)

    def rewound(self, num_steps: int, controllers: Mapping[str, Any], key: str) -> "History":
        """The history after going back `num_steps` steps. The kept checkpoints stay.

        Args:
            controllers: what they remember then.
            key: that made the run go back, or limits it.
        """
        rewinds = {**self.rewinds, key: self.num_rewinds(key) + 1}
        abandoned = self.abandoned_steps + num_steps
        return replace(
            self, attempt=self.attempt + 1, rewinds=rewinds, abandoned_steps=abandoned, controllers=controllers
        )

    def num_rewinds(self, key: str) -> int:
        """Counts how often the run has gone back because of this key; attempts of earlier versions count for any."""
        unknown = self.attempt - sum(self.rewinds.values())
        return self.rewinds.get(key, unknown)

    def without_pins(self) -> "History":
        """The history without its pinned checkpoints. The controllers that kept one start over."""
        others = {name: memory for name, memory in self.controllers.items() if "keeps" not in memory}
        return replace(self, controllers=others, pins={})

    def settled(self) -> "History":
        """The history once the abandoned checkpoints are set aside."""
        return replace(self, abandoned=())

    def to_json(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        usual = asdict(History())
        return {name: value for name, value in asdict(self).items() if value != usual[name]}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "History":
        """The reverse of `to_json`. Earlier versions had the fields `bad_steps` and `best` in place of controllers."""
        fields = {name: value for name, value in saved.items() if name not in ("bad_steps", "best")}
        tuples = {name: tuple(saved.get(name, ())) for name in ("phase_ends", "abandoned")}
        earlier: dict[str, Any] = {}
        if "bad_steps" in saved:
            earlier["bad_streak"] = {"state": saved["bad_steps"]}
        if "best" in saved:
            earlier["early_stopping"] = {"state": saved["best"], "keeps": "best"}
        return History(**{**fields, **tuples, "controllers": earlier | fields.get("controllers", {})})


@dataclass(frozen=True)
class Cursor:
    """The position of a run.

    Attributes:
        step: steps done.
        phase: index of the phase that the state belongs to.
        entering: whether the phase has just been entered. The checkpoint at the end of the previous phase has the same step.
        temporary: whether the next checkpoint replaces this one.
        history: what the configuration does not say about how the run came here.
    """

    step: int
    phase: int
    phase_name: str
    entering: bool
    temporary: bool
    history: History = field(default_factory=History)

    @property
    def folder_name(self) -> str:
        """`step-N`, or `step-N-<phase>` on entry of a later phase; `-attempt-A` follows if the run has gone back."""
        phase = f"-{self.phase_name}" if self.entering and self.phase > 0 else ""
        return f"step-{self.step}{phase}" + (f"-attempt-{self.history.attempt}" if self.history.attempt else "")

    def to_json(self) -> bytes:
        history = self.history.to_json()
        fields = {name: value for name, value in asdict(self).items() if name != "history"}
        return json.dumps(fields | ({"history": history} if history else {})).encode()

    @staticmethod
    def from_json(saved: bytes) -> "Cursor":
        """Parses a saved cursor. Raises `ValueError` or `TypeError` if it is malformed."""
        fields = json.loads(saved)
        return Cursor(**{**fields, "history": History.from_json(fields.get("history", {}))})


def replaced_by(newest: str, names: Sequence[str], read_cursor: Callable[[str], bytes]) -> list[str]:
    """The temporary checkpoints that the newest one replaces: those before it, without those that its cursor pins.

    Args:
        names: of the finished checkpoints, oldest first.
        read_cursor: returns the saved cursor of a checkpoint. One whose cursor cannot be read stays.
    """
    if newest not in names:
        return []
    history = Cursor.from_json(read_cursor(newest)).history
    staying = {*history.pins.values(), *history.abandoned}
    older = [name for name in names[: names.index(newest)] if name not in staying]
    return [name for name in older if _is_temporary(partial(read_cursor, name))]


def _is_temporary(read: Callable[[], bytes]) -> bool:
    try:
        return Cursor.from_json(read()).temporary
    except (OSError, ValueError, TypeError):
        return False


UNFINISHED, PENDING, DAMAGED, ABANDONED = ".unfinished", ".pending", ".damaged", ".abandoned"
"""Suffixes of names that are not finished checkpoints: partly written or deleted, not yet uploaded, set aside because they
are damaged, or because the run went back to before them."""
_NAME = re.compile(r"step-(\d+)(?:-([\w.]+))?(?:-attempt-(\d+))?")
_RESERVED_SUFFIX = re.compile(r"\.(?:unfinished|pending|(?:damaged|abandoned)(?:\.\d+)?)$")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """`step-N`, or `step-N-<phase>` on entry of a later phase, with `-attempt-A` if the run has gone back; ordered by age.

    Attributes:
        attempt: how often the run had gone back.
        step: steps done.
        entering: whether a phase has just been entered, which comes after the end of the previous phase at the same step.
        text: the full name.
    """

    attempt: int
    step: int
    entering: bool
    text: str

    @staticmethod
    def parse(text: str) -> "CheckpointName | None":
        """Parses a name; None if `text` is not the name of a finished checkpoint."""
        match = _NAME.fullmatch(text)
        if match is None or _RESERVED_SUFFIX.search(text):
            return None
        return CheckpointName(int(match[3] or 0), int(match[1]), match[2] is not None, text)


def find_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints in `folder`, oldest first, recognized by their names only."""
    if not folder.is_dir():
        return []
    names = (CheckpointName.parse(path.name) for path in folder.iterdir() if path.is_dir())
    return [folder / name.text for name in sorted(filter(None, names))]


def checkpoints_below(path: Path, *, of_runs: bool = True) -> list[Path]:
    """Finished checkpoints: `path` itself, or those in it and, with `of_runs`, in its subfolders; fewest steps first."""
    if (path / "run" / "cursor.json").is_file():
        return [path]
    runs = [path, *(sorted(path.iterdir()) if of_runs and path.is_dir() else [])]
    return in_order([(path.name, path) for path in find_checkpoints(run)] for run in runs)


def in_order(runs: Iterable[Sequence[tuple[str, T]]]) -> list[T]:
    """The checkpoints of several runs, each given with its name, fewest steps first.

    Those of a run's earlier attempts come before all others: the run went back to before some of their steps.
    """
    keyed: list[tuple[tuple[int, CheckpointName], T]] = []
    for run in runs:
        named = [(name, item) for text, item in run if (name := CheckpointName.parse(text)) is not None]
        newest = max((name.attempt for name, _ in named), default=0)
        keyed += [((name.attempt - newest, replace(name, attempt=0)), item) for name, item in named]
    return [item for _, item in sorted(keyed, key=operator.itemgetter(0))]
