"""What every kind of checkpoint folder promises: a checkpoint is complete or absent, whatever ends a save."""

import builtins
import contextlib
import io
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest

from jaxlm.engine.checkpoint import bucket
from jaxlm.engine.checkpoint.bucket import BucketFolder
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manifest import CHECKSUMS, Cursor, History
from jaxlm.engine.checkpoint.restore import (
    NoUsableCheckpointError,
    latest_valid,
    newest_undamaged,
    resolve_checkpoints,
    resolve_folder,
)
from jaxlm.engine.checkpoint.staging import StagedFolder
from jaxlm.engine.checkpoint.store import CURSOR, CheckpointFolder, SaveError

MEMORY = fsspec.filesystem("memory")
FILES = {"run/config.yaml": b"{}", "run/tokenizer/tokenizer.json": b"[]", "data/position.json": b"{}"}
KINDS = ("local", "bucket", "staged")


@dataclass
class Place:
    """Where a run's checkpoints are, and a disk on which they may be staged."""

    kind: str
    folder: Path

    @property
    def url(self) -> str:
        return str(self.folder / "run") if self.kind == "local" else "memory://folders/run"

    def start(self, machine: str = "here", *, said: list[str] | None = None, **options: bool) -> CheckpointFolder:
        """The folder as a start of the run opens it. Args: said: gets what it logs."""
        if self.kind == "local":
            opened: CheckpointFolder = LocalFolder(Path(self.url), **options)
        elif self.kind == "bucket":
            opened = BucketFolder(self.url, **options)
        else:
            opened = StagedFolder(self.url, self.folder / machine, **options)
        opened.open([].append if said is None else said.append)
        return opened

    def path(self, *parts: str) -> str:
        return "/".join((self.url.removeprefix("memory:/"), *parts))

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        return fsspec.filesystem("file") if self.kind == "local" else MEMORY

    def write(self, name: str, file: str, content: bytes) -> None:
        """Damages a finished checkpoint, where other machines find it."""
        self.fs.pipe_file(self.path(name, file), content)

    def content(self) -> set[str]:
        """The names of all that is in the folder, finished or not."""
        self.fs.invalidate_cache()
        return {name.rpartition("/")[2] for name in self.fs.ls(self.path(), detail=False)}


@pytest.fixture(params=KINDS)
def place(request, tmp_path, monkeypatch) -> Place:
    monkeypatch.setattr(bucket, "_probe_tensorstore", lambda url: None)
    return emptied(Place(request.param, tmp_path))


def emptied(place: Place) -> Place:
    if MEMORY.exists("/folders"):
        MEMORY.rm("/folders", recursive=True)
    return place


def save(
    folder: CheckpointFolder,
    step: int,
    *,
    temporary: bool = False,
    entering: bool = False,
    attempt: int = 0,
    abandoned: tuple[str, ...] = (),
    **pins: str,
) -> str:
    history = History(attempt, pins=pins, abandoned=abandoned)
    cursor = Cursor(step, int(entering), "second" if entering else "train", entering, temporary, history)
    name = cursor.folder_name
    folder.begin(name, {**FILES, CURSOR: cursor.to_json()})
    for file in ("0", "1", secrets.token_hex(4)):  # Orbax gives its files a name of their own in each save
        path = f"{folder.arrays(name)}/d/{file}"
        content = b"numbers %s of step %d" % (file.encode(), step)
        if path.startswith("memory://"):
            MEMORY.pipe_file(path.removeprefix("memory:/"), content)
        else:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(content)
    folder.commit(name)
    return name


def newest(folder: CheckpointFolder, said: list[str] | None = None) -> str:
    """The name of the checkpoint that a start goes on from."""
    found = latest_valid(folder, [].append if said is None else said.append)
    assert found is not None
    return found.checkpoint.name


@pytest.mark.parametrize(
    ("base", "run_id", "kind", "location"),
    [
        ("gs://b/runs/", "x", BucketFolder, "gs://b/runs/x"),
        ("gs://b/runs/x", None, BucketFolder, "gs://b/runs/x"),
        ("s3://b/runs", "x", StagedFolder, "s3://b/runs/x"),
        ("runs/", "x", LocalFolder, Path("runs/x")),
        ("runs", None, LocalFolder, Path("runs")),
    ],
)
def test_each_kind_of_path_has_its_checkpoint_folder(tmp_path, base, run_id, kind, location):
    folder = resolve_folder(base, run_id, tmp_path)
    assert (type(folder), folder.location) == (kind, location)


def test_save_and_restore_round_trip(place):
    folder = place.start()
    assert list(folder.checkpoints()) == []
    saved = [save(folder, 5), save(folder, 10), save(folder, 10, entering=True)]
    assert folder.names() == saved == ["step-5", "step-10", "step-10-second"]
    for start in (folder, place.start("elsewhere")):
        checkpoint = start.checkpoints()[-1]
        checkpoint.verify()
        assert checkpoint.name == saved[-1]
        assert checkpoint.cursor() == Cursor(10, 1, "second", entering=True, temporary=False)
        assert checkpoint.arrays == f"{checkpoint.location}/state"
        assert checkpoint.read("state/d/1") == b"numbers 1 of step 10"
        with checkpoint.local("run/tokenizer") as tokenizer:
            assert [path.name for path in tokenizer.iterdir()] == ["tokenizer.json"]
    found = start.find("step-5")
    found.verify()
    assert found.read("state/d/0") == b"numbers 0 of step 5"


@pytest.mark.parametrize(("of_runs", "expected"), [(True, "step-10"), (False, None)])
def test_runs_below_a_folder_are_found(place, tmp_path, of_runs, expected):
    for run, step in (("one", 9), ("two", 10)):
        folder = resolve_folder(place.url, run, tmp_path / "staging")
        if place.kind == "staged":
            folder.open(print)
        elif place.kind == "bucket":
            folder = BucketFolder(f"{place.url}/{run}")
        save(folder, step)
    found = resolve_checkpoints(place.url, tmp_path / "copies", of_runs=of_runs)
    assert [one.name for one in found[-1:]] == ([expected] if expected else [])
    for below in ("one", "one/", "one/step-9"):
        (one,) = resolve_checkpoints(f"{place.url}/{below}", tmp_path / "copies", of_runs=False)
        assert one.name == "step-9"
        one.verify()


def test_each_checkpoint_replaces_the_temporary_ones_before_it(place):
    folder = place.start()
    for step, temporary in ((1, True), (2, False), (3, True), (4, True)):
        save(folder, step, temporary=temporary)
    assert folder.names() == ["step-2", "step-4"]
    save(place.start(delete_temporary=False), 5)
    assert folder.names() == ["step-2", "step-4", "step-5"]
    save(folder, 4, temporary=True)  # it deletes neither itself nor what comes after it
    assert folder.names() == ["step-2", "step-4", "step-5"]
    folder.find("step-4").verify()


def test_a_pinned_checkpoint_stays_until_the_newest_no_longer_pins_it(place):
    folder = place.start()
    save(folder, 1, temporary=True)
    save(folder, 2, temporary=True, best="step-1")
    save(folder, 3, temporary=True, best="step-1", before_streak="step-2")
    assert folder.names() == ["step-1", "step-2", "step-3"]
    save(folder, 4, temporary=True, best="step-2")
    assert folder.names() == ["step-2", "step-4"]
    save(folder, 1, temporary=True, attempt=1)
    assert folder.names() == ["step-1-attempt-1"]


def test_a_checkpoint_whose_cursor_cannot_be_read_stays(place):
    """It must not make every later save fail."""
    folder = place.start()
    for step in (1, 2, 3):
        save(folder, step, temporary=step < 3, **({"best": "step-1"} if step > 1 else {}))
    place.write("step-1", CURSOR, b"[]")
    save(folder, 4)
    assert folder.names() == ["step-1", "step-3", "step-4"]
    place.fs.rm_file(place.path("step-1", CURSOR))
    save(folder, 5)
    assert folder.names() == ["step-1", "step-3", "step-4", "step-5"]


def test_abandoned_checkpoints_are_neither_found_nor_deleted(place):
    folder = place.start()
    save(folder, 1, temporary=True)
    save(folder, 2, temporary=True, best="step-1")
    save(folder, 1, temporary=True, attempt=1, abandoned=("step-2",))
    assert folder.names() == ["step-2", "step-1-attempt-1"]
    found = folder.abandon("step-2")
    for step in (2, 3):
        save(folder, step, temporary=True, attempt=1)
    folder.prepare()
    assert folder.names() == ["step-3-attempt-1"]
    assert found.startswith("step-2")
    assert place.fs.exists(place.path(found))
    assert place.fs.exists(place.path(found.partition("/")[0], CURSOR))


def test_an_older_checkpoint_is_found_and_a_damaged_one_passed_over(place):
    folder = place.start()
    for step in (1, 2, 3):
        save(folder, step, best="step-1", before_streak="step-2")
    said: list[str] = []
    assert newest_undamaged(folder, ["step-1", "step-2"], said.append).checkpoint.name == "step-2"
    place.write("step-2", CHECKSUMS, b"{}")
    assert newest_undamaged(folder, ["step-1", "step-2"], said.append).checkpoint.name == "step-1"
    assert "checkpoint step-2 is damaged" in said[0]
    assert newest_undamaged(folder, ["step-2"], said.append) is None


def test_damaged_checkpoints_are_kept_aside_and_the_one_before_is_used(place):
    folder = place.start()
    for step in (1, 2, 3):
        save(folder, step)
    place.write("step-3", "state/d/1", b"nombers 1 of step 3")
    place.fs.rm_file(place.path("step-2", "run/config.yaml"))
    said: list[str] = []
    folder = place.start("elsewhere", said=said)
    assert newest(folder, said) == "step-1"
    assert "step-3 is damaged: state/d/1" in said[0]
    assert "step-2 is damaged: run/config.yaml" in said[1]
    folder.prepare()
    kept = [name for name in place.fs.find(place.path()) if name.endswith("state/d/1")]
    assert len(kept) == 3  # they can still be looked at
    save(folder, 3)  # the run reaches this step again
    folder = place.start("third")
    folder.checkpoints()[-1].verify()
    assert newest(folder) == "step-3"


def test_nothing_is_changed_if_every_checkpoint_is_damaged(place):
    folder = place.start()
    for step in (1, 2):
        save(folder, step)
    for checkpoint in folder.checkpoints():
        on_disk = Path(str(checkpoint.location), "state/d/1")
        on_disk.write_bytes(b"") if on_disk.exists() else place.write(checkpoint.name, "state/d/1", b"")
    before = place.content()
    with pytest.raises(NoUsableCheckpointError, match=r"every checkpoint in .* is damaged"):
        latest_valid(folder, print)
    assert place.content() == before


class KilledError(BaseException):
    """Ends a process at once: no handler of errors acts after it."""


ON_DISK = [(os, name) for name in ("mkdir", "rename", "unlink", "rmdir")] + [(io, "open"), (builtins, "open")]
IN_STORE = [(type(MEMORY), name) for name in ("pipe_file", "put_file", "rm_file", "rmdir")]


@contextlib.contextmanager
def ended_at(number: int, error: type[BaseException]) -> Iterator[list[str]]:
    """From call `number` on, every call that changes a disk or a store raises `error`. Yields the names of the calls.

    Of a file that is opened to be written, nothing has been written then.
    """
    done: list[str] = []

    def ending(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            if name == "open" and not set("wax+") & set(str(args[1] if len(args) > 1 else kwargs.get("mode", "r"))):
                return call(*args, **kwargs)
            done.append(name)
            if len(done) >= number:
                if name == "open" and len(done) == number:
                    call(*args, **kwargs).close()  # type: ignore[attr-defined]
                raise error("no answer")
            return call(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda _: None)
        for owner, name in [*ON_DISK, *IN_STORE]:
            patch.setattr(owner, name, ending(name, getattr(owner, name)))
        yield done


def test_a_checkpoint_that_is_half_abandoned_is_whole_or_hidden(place):
    folder, number, hidden = place.start(), 0, False
    while not hidden:
        number += 1
        for step in (1, 2):
            save(folder, step)
        with ended_at(number, KilledError), contextlib.suppress(KilledError):
            folder.abandon("step-2")
            hidden = True
        folder.prepare()
        whole = ["step-1"] if hidden else ["step-1", "step-2"]
        assert folder.names() == whole
        assert newest(place.start("elsewhere")) == whole[-1]
    assert place.fs.exists(next(path for path in place.fs.find(place.path()) if "step-2" in path))


@pytest.mark.slow
@pytest.mark.parametrize("error", [KilledError, OSError])
@pytest.mark.parametrize("name", ["step-3", "step-2"])
def test_whatever_ends_a_save_it_is_complete_or_absent(place, tmp_path, monkeypatch, name, error):
    """The next start finds what is complete, removes the rest, and saves again. `step-2` is saved a second time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # what has been written stays, here
    step, number, found = int(name.removeprefix("step-")), 0, set()
    before = {"step-2"} if step == 3 else {"step-1", "step-2"}
    has_ended = False
    while not has_ended:
        number += 1
        at = emptied(Place(place.kind, tmp_path / str(number)))
        folder = at.start()
        folder.prepare()
        save(folder, 1)
        save(folder, 2, temporary=True)
        with ended_at(number, error) as done, contextlib.suppress(error, SaveError):
            save(folder, step, temporary=step == 3)
        has_ended = len(done) < number
        for machine in ("elsewhere", "here"):
            opened = at.start(machine)
            found.add(newest(opened))
            assert found <= {*before, name}, (number, done)
        if error is KilledError:
            folder = opened
            folder.prepare()
            assert at.content() == set(folder.names())
        save(folder, step, temporary=step == 3)
        assert folder.names() == ["step-1", name]
        assert at.content() == {"step-1", name}
        assert len(at.fs.find(at.path(name, "state"))) == 3
        assert newest(at.start("elsewhere")) == newest(at.start()) == name
    assert number > 10, done
    assert name in found
