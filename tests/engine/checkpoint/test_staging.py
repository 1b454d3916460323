"""Checkpoints behind a URL, in fsspec's in-memory store: complete or absent, whatever fails."""

import contextlib
import errno
import os
from pathlib import Path

import fsspec
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.stores import is_url
from jaxlm.engine.checkpoint.bucket import BucketFolder
from jaxlm.engine.checkpoint.manifest import Cursor, DamagedError, verify
from jaxlm.engine.checkpoint.restore import latest_valid
from jaxlm.engine.checkpoint.staging import StagedFolder, staged_checkpoints
from jaxlm.engine.checkpoint.store import CURSOR, SaveError

URL = "memory://store/run"


@pytest.fixture
def store():
    fs = fsspec.filesystem("memory")
    if fs.exists("/store"):
        fs.rm("/store", recursive=True)
    return fs


def save(folder: StagedFolder, step: int, *, temporary: bool = False, entering: bool = False) -> str:
    cursor = Cursor(step, int(entering), "second" if entering else "train", entering, temporary)
    name = cursor.folder_name
    folder.begin(name, {CURSOR: cursor.to_json()})
    arrays = Path(folder.arrays(name), "d")
    arrays.mkdir(parents=True)
    (arrays / "array").write_bytes(b"numbers")
    folder.commit(name)
    return name


def opened(machine: Path, *, delete_temporary: bool = True) -> tuple[StagedFolder, list[str]]:
    """A run's checkpoint folder as opened at a start on one machine, and the logged lines."""
    folder, said = StagedFolder(URL, machine, delete_temporary=delete_temporary), []
    folder.open(said.append)
    return folder, said


def names(folder: StagedFolder) -> list[str]:
    return [checkpoint.name for checkpoint in folder.checkpoints()]


@contextlib.contextmanager
def breaking(store, method: str, after: int = 0):
    """Breaks the connection to the store after the given number of calls."""
    does, done = getattr(type(store), method), []

    def counting(self, *args, **kwargs):
        if len(done) == after:
            raise OSError("the connection broke")
        done.append(1)
        return does(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store), method, counting)
        yield


class TestFullDisk:
    """A full local disk is not reported as a failure of the object store."""

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_while_a_checkpoint_is_downloaded(self, store, tmp_path, monkeypatch, number):
        save(opened(tmp_path / "here")[0], 5)

        def full(*args, **kwargs):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(type(store), "get_file", full)
        said = rf"trainer\.checkpointer\.staging_dir: .*{os.strerror(number)}"
        with pytest.raises(ConfigError, match=said):
            opened(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match=said):
            staged_checkpoints(URL, tmp_path / "staging")

    def test_a_folder_that_cannot_be_created(self, store, tmp_path):
        (tmp_path / "a file").write_text("")
        with pytest.raises(
            ConfigError, match=r"trainer\.checkpointer\.staging_dir: cannot use .*a file/x.* to stage checkpoints"
        ):
            opened(tmp_path / "a file" / "x")

    def test_failures_of_the_store_still_name_the_store(self, store, tmp_path, monkeypatch):
        def refused(*args, **kwargs):
            raise PermissionError("Access Denied")

        monkeypatch.setattr(type(store), "pipe_file", refused)
        with pytest.raises(
            ConfigError,
            match=r"checkpointer\.base_path: cannot write to 'memory://store/run' \(PermissionError: Access",
        ):
            opened(tmp_path / "here")


def test_urls_are_recognized():
    assert [is_url(path) for path in ("s3://a/b", "gs://a", "a/b", "/a/b", "checkpoints/")] == [
        True,
        True,
        *[False] * 3,
    ]


def test_only_the_newest_checkpoint_stays_on_the_disk(store, tmp_path):
    folder, _ = opened(tmp_path)
    for step in (1, 2):
        save(folder, step)
    assert names(folder) == ["step-2"]
    assert folder.names() == ["step-1", "step-2"]


def test_opening_does_not_change_the_store(store, tmp_path):
    """The run may still be refused because it is a different one."""
    folder, _ = opened(tmp_path)
    save(folder, 1, temporary=True)
    with breaking(store, "put_file", 2), pytest.raises(SaveError, match="connection broke"):
        save(folder, 2)
    before = {path: store.cat_file(path) for path in store.find("/store")}
    folder, _ = opened(tmp_path)
    assert {path: store.cat_file(path) for path in store.find("/store")} == before
    assert names(folder) == ["step-1", "step-2"]


def test_a_pending_upload_yields_to_newer_checkpoints_of_another_machine(store, tmp_path):
    local, _ = opened(tmp_path / "here")
    with breaking(store, "put_file"), pytest.raises(SaveError, match="connection broke"):
        save(local, 2)
    save(opened(tmp_path / "there")[0], 4, temporary=True)
    local, _ = opened(tmp_path / "here")
    newest = latest_valid(local, print)
    assert newest is not None
    local.prepare()
    newest.checkpoint.verify()
    assert newest.checkpoint.name == "step-4"
    assert BucketFolder(URL).names() == ["step-2", "step-4"]


def test_a_refused_start_leaves_the_folder_of_the_holder_as_it_is(store, tmp_path):
    """Before it is refused, it has found what it would continue from."""
    holder, _ = opened(tmp_path)
    with holder.locked(print):
        save(holder, 2)
        save(holder, 4, temporary=True)
        store.rm("/store/run/step-4", recursive=True)  # not uploaded yet, for one that looks at this moment
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ConfigError, match="already being trained"):
            opened(tmp_path)
        assert sorted(tmp_path.rglob("*")) == before


def test_a_start_continues_from_what_the_holder_saved_while_it_waited(store, tmp_path):
    here, _ = opened(tmp_path / "here")
    save(here, 2)
    there, _ = opened(tmp_path / "there")
    assert names(there) == ["step-2"]
    save(here, 4)
    with there.locked(print):
        assert names(there) == ["step-4"]


def test_damage_in_the_store_is_detected_and_the_previous_checkpoint_is_used(store, tmp_path):
    folder, _ = opened(tmp_path / "here")
    for step in (1, 2):
        save(folder, step)
    store.pipe_file("/store/run/step-2/state/d/array", b"nombers")
    with pytest.raises(DamagedError):
        BucketFolder(URL).download("step-2", tmp_path)
    folder, (said,) = opened(tmp_path / "elsewhere")
    assert "step-2 is damaged" in said
    assert names(folder) == ["step-1"]
    with pytest.raises(ConfigError, match="step-2 is damaged: state/d/array is not what was saved"):
        staged_checkpoints(URL, tmp_path / "reader")


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b"\xff"])
def test_damaged_checksums_are_damage(tmp_path, content):
    (tmp_path / "checksums.json").write_bytes(content)
    with pytest.raises(DamagedError, match=r"cannot read checksums\.json"):
        verify(tmp_path)


def test_a_damaged_local_copy_is_downloaded_again(store, tmp_path):
    """The checkpoint in the store is intact, so nothing is lost and the run continues."""
    save(opened(tmp_path)[0], 1)
    (copied,) = staged_checkpoints(URL, tmp_path)
    (copied / "state" / "d" / "array").write_bytes(b"nombers")
    folder, said = opened(tmp_path)
    newest = latest_valid(folder, said.append)
    assert newest is not None
    assert newest.checkpoint.name == "step-1"
    assert said == []


def test_the_store_is_authoritative(store, tmp_path):
    """Checkpoints deleted in the store are not restored from a local copy."""
    save(opened(tmp_path)[0], 1)
    store.rm("/store/run/step-1", recursive=True)
    assert names(opened(tmp_path)[0]) == []


def test_an_unknown_protocol_is_one_message():
    with pytest.raises(ConfigError, match="nosuch://a"):
        BucketFolder("nosuch://a").names()
