"""The files of a checkpoint in a bucket, copied to the local disk."""

import json

import fsspec
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.engine.checkpoint.bucket import BucketCheckpoint
from jaxlm.engine.checkpoint.remote import RemoteFolder

CONTENTS = {"run/config.yaml": b"model: {}", "run/tokenizer/tokenizer.json": b"{}", "arrays/d/0": b"\0"}


@pytest.fixture
def checkpoint():
    fs = fsspec.filesystem("memory")
    for file, content in {**CONTENTS, "checksums.json": json.dumps(dict.fromkeys(CONTENTS, "0")).encode()}.items():
        fs.pipe_file(f"/runs/x/step-2/{file}", content)
    yield BucketCheckpoint(RemoteFolder("memory://runs/x"), "step-2")
    fs.rm("/runs", recursive=True)


def test_a_folder_is_copied_in_full_although_the_list_of_the_store_lags(checkpoint, monkeypatch):
    monkeypatch.setattr(fsspec.filesystem("memory"), "find", lambda *_, **__: {}, raising=False)
    with checkpoint.local("run") as folder:
        files = {path.relative_to(folder.parent).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}
    assert files == {file: content for file, content in CONTENTS.items() if file.startswith("run/")}


def test_a_missing_file_is_named(checkpoint):
    fsspec.filesystem("memory").rm("/runs/x/step-2/run/tokenizer/tokenizer.json")
    with pytest.raises(ConfigError, match=r"step-2.*tokenizer\.json"), checkpoint.local("run"):
        pass


def test_damaged_checksums_are_one_message(checkpoint):
    checkpoint.folder.write("step-2", "checksums.json", b"[")
    with pytest.raises(ConfigError, match=r"step-2 is damaged: cannot read checksums\.json"), checkpoint.local("run"):
        pass
