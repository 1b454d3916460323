"""Checkpoints in a bucket: complete or absent, whatever fails during a save.

Uses fsspec's in-memory store. The last tests use an emulator of Google's, if one is installed.
"""

import base64
import hashlib
import json
import sys
import tempfile

import fsspec
import haliax as hax
import jax
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout
from jaxlm.core.stores import check_store_writable
from jaxlm.engine.checkpoint import bucket
from jaxlm.engine.checkpoint.bucket import BucketFolder
from jaxlm.engine.checkpoint.manifest import Cursor, DamagedError, seal, verify
from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.checkpoint.restore import (
    latest_complete,
    latest_valid,
    resolve_checkpoints,
    resolve_folder,
    restore,
)
from jaxlm.engine.checkpoint.store import CURSOR, SaveError
from jaxlm.engine.checkpoint.writer import CheckpointWriter, SaveHealth
from tests.engine.helpers import layout
from tests.gcs import BUCKET

URL = "memory://bucket/run"
FILES = {"run/config.yaml": b"{}", "run/tokenizer/tokenizer.json": b"[]", "data/position.json": b"{}"}


@pytest.fixture
def store():
    fs = fsspec.filesystem("memory")
    if fs.exists("/bucket"):
        fs.rm("/bucket", recursive=True)
    return fs


@pytest.fixture
def with_md5(store, monkeypatch):
    """The store reports the MD5 of every object, as Google's does."""
    find = type(store).find

    def saying(self, *args, **kwargs):
        found = find(self, *args, **kwargs)
        for path, info in found.items() if isinstance(found, dict) else ():
            info["md5Hash"] = base64.b64encode(hashlib.md5(self.cat_file(path)).digest()).decode()
        return found

    monkeypatch.setattr(type(store), "find", saying)


def save(store, folder: BucketFolder, step: int, *, temporary: bool = False) -> str:
    cursor = Cursor(step, 0, "train", entering=False, temporary=temporary)
    name = cursor.folder_name
    folder.begin(name, {**FILES, CURSOR: cursor.to_json()})
    for number in range(2):  # the parts of two processes
        store.pipe_file(f"{folder.arrays(name).removeprefix('memory:/')}/d/{number}", b"numbers %d" % number)
    folder.commit(name)
    return name


def names(folder: BucketFolder) -> list[str]:
    return [checkpoint.name for checkpoint in folder.checkpoints()]


@pytest.mark.parametrize("method", ["pipe_file", "rm_file"])
def test_starts_at_the_same_time_try_out_the_store_apart(store, monkeypatch, method):
    does, between = getattr(type(store), method), []

    def probing(self, path, *args, **kwargs):
        if not between:  # the other start does all of it at this moment
            between.append(path)
            BucketFolder(URL).open(print)
            check_store_writable(URL, "key")
        does(self, path, *args, **kwargs)

    monkeypatch.setattr(bucket, "_probe_tensorstore", lambda url: None)
    monkeypatch.setattr(type(store), method, probing)
    BucketFolder(URL).open(print)
    between.clear()
    check_store_writable(URL, "key")
    assert not store.find("/bucket")


def test_a_checkpoint_is_copied_in_full_or_not_at_all(store, monkeypatch):
    """Whatever the store lists: `checksums.json` says which files there are."""
    folder = BucketFolder(URL)
    save(store, folder, 5)
    (checkpoint,) = folder.checkpoints()
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "find", lambda *_, **__: {})
        with checkpoint.local("run/tokenizer") as run:
            assert (run / "tokenizer.json").read_bytes() == FILES["run/tokenizer/tokenizer.json"]
    store.rm_file("/bucket/run/step-5/run/config.yaml")
    with pytest.raises(ConfigError, match=r"step-5.*run/config\.yaml"), checkpoint.local("run"):
        pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[", r"cannot read checksums\.json"),
        (b'{"run/../../../taken": "0"}', r"names 'run/\.\./\.\./\.\./taken', which is outside the checkpoint"),
        (b'{"/run/taken": "0"}', r"names '/run/taken', which is outside the checkpoint"),
    ],
)
def test_damaged_checksums_are_one_message_and_write_nothing(store, monkeypatch, tmp_path, content, message):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    folder = BucketFolder(URL)
    save(store, folder, 5)
    store.pipe_file("/bucket/run/step-5/checksums.json", content)
    store.pipe_file("/bucket/run/step-5/run/../../../taken", b"by an attacker")
    (checkpoint,) = folder.checkpoints()
    with pytest.raises(ConfigError, match=f"step-5 is damaged: .*{message}"), checkpoint.local("run"):
        pass
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "t"]


def test_a_checkpoint_that_another_process_has_partly_deleted_is_not_finished(store):
    """With checksums of the files that are left, it would pass for an undamaged one."""
    folder = BucketFolder(URL)
    folder.begin("step-5", FILES)
    store.rm("/bucket/run/step-5/run", recursive=True)
    with pytest.raises(SaveError, match=r"run/config\.yaml is gone: another process has deleted it"):
        folder.commit("step-5")
    assert names(folder) == []


UNANSWERED = [TimeoutError("no answer"), OSError("Forbidden: 403"), RuntimeError("what another library raises")]


@pytest.mark.parametrize("file", ["checksums.json", "run/cursor.json"])
@pytest.mark.parametrize("error", UNANSWERED, ids=lambda error: type(error).__name__)
def test_an_unresponsive_store_is_an_error_and_not_damage(store, monkeypatch, file, error):
    """Otherwise a short network failure would cost the newest checkpoint."""
    folder, logged, cat = BucketFolder(URL), [], type(store).cat_file
    for step in (1, 2):
        save(store, folder, step)

    def unanswered(self, path, *args, **kwargs):
        if path.endswith(f"step-2/{file}"):
            raise error
        return cat(self, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "cat_file", unanswered)
        with pytest.raises(ConfigError, match=rf"cannot read {URL}/step-2 \({type(error).__name__}: {error}\)"):
            latest_valid(folder, logged.append)
        with pytest.raises(ConfigError, match=f"cannot read {URL}/step-2 "):
            latest_complete(folder.checkpoints(), URL, logged.append)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "ls", lambda *args, **kwargs: unanswered(store, f"step-2/{file}"))
        with pytest.raises(ConfigError, match=f"cannot read {URL} "):
            latest_valid(folder, logged.append)
    assert logged == []
    assert latest_valid(folder, logged.append).checkpoint.name == "step-2"


def test_checksums_of_the_store_are_used_without_reading_files(store, with_md5, monkeypatch):
    folder, read = BucketFolder(URL), []
    save(store, folder, 1)
    sums = json.loads(store.cat_file("/bucket/run/step-1/checksums.json"))
    assert sums["state/d/0"] == f"md5:{hashlib.md5(b'numbers 0').hexdigest()}"
    opened = type(store)._open
    monkeypatch.setattr(
        type(store), "_open", lambda self, path, *a, **k: read.append(path) or opened(self, path, *a, **k)
    )
    folder.checkpoints()[0].verify()
    assert read == []
    store.pipe_file("/bucket/run/step-1/state/d/0", b"numbers 1")
    with pytest.raises(DamagedError, match="state/d/0 is not what was saved"):
        folder.checkpoints()[0].verify()


def test_a_checkpoint_can_be_copied_to_a_disk_and_back(store, with_md5, tmp_path):
    """Each side checks the other's checksums."""
    folder = BucketFolder(URL)
    save(store, folder, 1)
    store.get("/bucket/run/step-1", str(tmp_path / "step-1"), recursive=True)
    verify(tmp_path / "step-1")
    (tmp_path / "step-1" / "checksums.json").unlink()
    seal(tmp_path / "step-1")
    store.put(str(tmp_path / "step-1"), "/bucket/run/step-2", recursive=True)
    folder.checkpoints()[-1].verify()
    store.pipe_file("/bucket/run/step-2/run/config.yaml", b"{ ")
    with pytest.raises(DamagedError, match=r"run/config\.yaml"):
        folder.checkpoints()[-1].verify()


def test_a_missing_package_is_one_message(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(
        sys.modules["fsspec.registry"]._registry, "gs", raising=False
    )  # an earlier test may have used it
    with pytest.raises(ConfigError, match=r"gs://nowhere/x.*gcsfs"):
        BucketFolder("gs://nowhere/x").open(print)
    with pytest.raises(ConfigError, match="gcsfs"):
        resolve_checkpoints("gs://nowhere/x", tmp_path)


@pytest.mark.slow
def test_states_are_written_to_a_server_and_read_back(gcs, tmp_path):
    """Orbax, TensorStore and gcsfs against an emulator: sharded arrays, bit for bit; a damaged one is not used."""
    where, logged = layout(), []
    folder = resolve_folder(f"gs://{BUCKET}/runs", "x", tmp_path)
    folder.open(logged.append)
    health = SaveHealth(CheckpointerConfig(), None, logged.append)
    writer = CheckpointWriter(folder, {"config.yaml": b"{}"}, health, logged.append, lambda: None)
    folder.prepare()
    states = [state(seed, where) for seed in range(2)]
    for step, temporary in enumerate((False, True)):
        writer.save(states[step], Cursor(step, 0, "train", entering=False, temporary=temporary), {"seen": step})
    found = latest_valid(folder, logged.append)
    assert (found.location, found.cursor.temporary, found.position()) == (
        f"gs://{BUCKET}/runs/x/step-1",
        True,
        {"seen": 1},
    )
    sums = json.loads(found.checkpoint.read("checksums.json"))
    assert {value.partition(":")[0] for value in sums.values()} == {"md5"}
    abstract = jax.eval_shape(lambda: states[0])
    assert same(restore(found, abstract, where), states[1])
    assert list(tmp_path.iterdir()) == []  # nothing was written to the local disk

    store = fsspec.filesystem("gs")
    chunk = f"{BUCKET}/runs/x/step-1/" + next(file for file in sums if "/d/" in file)
    content = store.cat_file(chunk)
    store.pipe_file(chunk, content[:-1] + bytes([content[-1] ^ 0x10]))
    found = latest_valid(folder, logged.append)
    assert found.checkpoint.name == "step-0"
    assert "step-1 is damaged: state/" in logged[-1]
    assert same(restore(found, abstract, where), states[0])
    assert [c.location for c in resolve_checkpoints(f"gs://{BUCKET}/runs", tmp_path)] == [
        f"gs://{BUCKET}/runs/x/step-0"
    ]


def state(seed: int, where: Layout) -> dict[str, hax.NamedArray]:
    axes = (hax.Axis("embed", 32), hax.Axis("mlp", 64))
    numbers = np.random.default_rng(seed).normal(size=(32, 64)).astype(np.float32)
    return {"w": hax.named(jax.device_put(numbers, where.parameter_sharding(axes)), axes)}


def same(one: dict[str, hax.NamedArray], two: dict[str, hax.NamedArray]) -> bool:
    assert one["w"].array.sharding == two["w"].array.sharding
    return bool(np.array_equal(one["w"].array, two["w"].array))


def test_a_missing_bucket_is_one_message(gcs, tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.checkpointer\.base_path: cannot use gs://nowhere/runs/x"):
        resolve_folder("gs://nowhere/runs", "x", tmp_path).open(print)
