"""Checkpoints behind a URL, on fsspec's store in memory: whole or not there, whatever fails on the way."""

import errno
import json
import os
from pathlib import Path

import fsspec
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.engine.integrity import CHECKSUMS, DamagedError, seal
from jaxlm.engine.remote import RemoteFolder, is_url
from jaxlm.engine.staging import Staging, staged, staging_folder

URL = "memory://store/run"


@pytest.fixture
def store():
    fs = fsspec.filesystem("memory")
    if fs.exists("/store"):
        fs.rm("/store", recursive=True)
    return fs


def checkpoint(folder: Path, name: str, *, temporary: bool = False, content: bytes = b"numbers") -> Path:
    path = folder / name
    (path / "run").mkdir(parents=True)
    (path / "state" / "d").mkdir(parents=True)
    (path / "run" / "cursor.json").write_text(json.dumps({"temporary": temporary}))
    (path / "state" / "d" / "array").write_bytes(content)
    seal(path)
    return path


def synchronised(folder: Path) -> list[str]:
    said: list[str] = []
    Staging(URL, folder).synchronise(said.append)
    return said


class TestFullDisk:
    """Deviation: a full local disk is none of the store's faults, and is not called one."""

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_while_a_checkpoint_is_fetched(self, store, tmp_path, monkeypatch, number):
        here = tmp_path / "here"
        synchronised(here)
        Staging(URL, here).publish(checkpoint(here, "step-5"))

        def full(*args, **kwargs):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(type(store), "get_file", full)
        said = rf"trainer\.checkpointer\.staging_dir: .*{os.strerror(number)}"
        with pytest.raises(ConfigError, match=said):
            synchronised(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match=said):
            staged(URL, tmp_path / "staging")

    def test_a_folder_that_cannot_be_made(self, store, tmp_path):
        (tmp_path / "a file").write_text("")
        with pytest.raises(ConfigError, match=r"trainer\.checkpointer\.staging_dir: .*a file/x.* cannot be used"):
            synchronised(tmp_path / "a file" / "x")

    def test_the_store_is_still_named_where_it_is_the_store(self, store, tmp_path, monkeypatch):
        def refused(*args, **kwargs):
            raise PermissionError("Access Denied")

        monkeypatch.setattr(type(store), "pipe_file", refused)
        with pytest.raises(ConfigError, match=r"trainer\.checkpointer\.base_path: memory://store/run cannot be used"):
            synchronised(tmp_path / "here")


def test_what_is_a_url():
    assert [is_url(path) for path in ("s3://a/b", "gs://a", "a/b", "/a/b", "checkpoints/")] == [
        True,
        True,
        *[False] * 3,
    ]


def test_there_and_back(store, tmp_path):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    synchronised(here)
    staging = Staging(URL, here)
    for name in ("step-5", "step-10", "step-10-second"):
        staging.publish(checkpoint(here, name))
    assert RemoteFolder(URL).names() == ["step-5", "step-10", "step-10-second"]
    assert [path.name for path in here.iterdir()] == ["step-10-second"]
    synchronised(elsewhere)
    files = {p.relative_to(elsewhere): p.read_bytes() for p in elsewhere.rglob("*") if p.is_file()}
    assert files == {p.relative_to(here): p.read_bytes() for p in here.rglob("*") if p.is_file()}


def test_each_checkpoint_replaces_the_temporary_ones(store, tmp_path):
    staging = Staging(URL, tmp_path)
    for name, temporary in (("step-1", True), ("step-2", False), ("step-3", True), ("step-4", True)):
        staging.publish(checkpoint(tmp_path, name, temporary=temporary))
    assert RemoteFolder(URL).names() == ["step-2", "step-4"]
    kept = Staging(URL, tmp_path, delete_temporary=False)
    kept.publish(checkpoint(tmp_path, "step-5"))
    assert RemoteFolder(URL).names() == ["step-2", "step-4", "step-5"]


@pytest.mark.parametrize("after", range(4))
def test_an_upload_that_breaks_off_is_never_seen_and_made_up_for(store, tmp_path, monkeypatch, after):
    """Whatever file it breaks off at; and what is already there under the same name is not taken for the new one."""
    here = tmp_path / "here"
    staging = Staging(URL, here)
    staging.publish(checkpoint(here, "step-1"))
    put, done = type(store).put_file, []

    def breaking(self, *args, **kwargs):
        if len(done) == after:
            raise OSError("the connection broke")
        done.append(1)
        return put(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "put_file", breaking)
        finished = checkpoint(here, "step-2")
        if after < 3:
            with pytest.raises(OSError, match="connection broke"):
                staging.publish(finished)
            assert RemoteFolder(URL).names() == ["step-1"]
            assert [path.name for path in staged(URL, tmp_path / "reader")] == ["step-1"]
        else:
            staging.publish(finished)
    synchronised(here)
    assert RemoteFolder(URL).names() == ["step-1", "step-2"]
    assert [path.name for path in here.iterdir()] == ["step-2"]


def test_a_deletion_that_breaks_off_leaves_nothing_that_looks_whole(store, tmp_path, monkeypatch):
    Staging(URL, tmp_path).publish(checkpoint(tmp_path, "step-1"))
    remote = RemoteFolder(URL)

    def breaking(*_args, **_kwargs):
        raise OSError("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "rm", breaking)
        with pytest.raises(OSError, match="connection broke"):
            remote.delete("step-1")
    assert remote.names() == []
    remote.remove_unfinished()
    assert not store.exists("/store/run/step-1")


def test_damage_over_there_is_noticed_and_the_one_before_used(store, tmp_path):
    staging = Staging(URL, tmp_path / "here")
    for name in ("step-1", "step-2"):
        staging.publish(checkpoint(tmp_path / "here", name))
    store.pipe_file("/store/run/step-2/state/d/array", b"nombers")
    with pytest.raises(DamagedError):
        RemoteFolder(URL).download("step-2", tmp_path)
    (said,) = synchronised(tmp_path / "elsewhere")
    assert "step-2 is damaged" in said
    assert [path.name for path in (tmp_path / "elsewhere").iterdir() if path.name.count(".") == 0] == ["step-1"]


def test_the_store_is_the_truth(store, tmp_path):
    """What was deleted over there does not come back from a local copy."""
    Staging(URL, tmp_path).publish(checkpoint(tmp_path, "step-1"))
    RemoteFolder(URL).delete("step-1")
    synchronised(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_discovery_below_a_url(store, tmp_path):
    for run, name in (("one", "step-9"), ("two", "step-10")):
        Staging(f"memory://store/{run}", tmp_path / run).publish(checkpoint(tmp_path / run, name))
    for url, expected in (
        ("memory://store", "step-10"),
        ("memory://store/one/", "step-9"),
        ("memory://store/one/step-9", "step-9"),
    ):
        (found,) = staged(url, tmp_path / "copies")
        assert found.name == expected
        assert (found / CHECKSUMS).is_file()
    assert staged("memory://nowhere", tmp_path) == []
    assert staging_folder(tmp_path, "memory://store/one/") == staging_folder(tmp_path, "memory://store/one")


def test_an_unknown_protocol_is_a_message():
    with pytest.raises(ConfigError, match="nosuch://a"):
        RemoteFolder("nosuch://a")
