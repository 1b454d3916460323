"""Checkpoints on a disk: what is replaced, and a disk that is not the same for all processes."""

import os

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.engine import local_folder
from jaxlm.engine.cursor import Cursor
from jaxlm.engine.folder import CURSOR
from jaxlm.engine.local_folder import LocalFolder


def save(folder: LocalFolder, step: int, *, temporary: bool) -> None:
    cursor = Cursor(step, 0, "train", entering=False, temporary=temporary)
    folder.begin(cursor.folder_name, {CURSOR: cursor.to_json()})
    folder.commit(cursor.folder_name)


def test_a_temporary_checkpoint_replaces_the_one_of_its_own_name(tmp_path):
    folder = LocalFolder(tmp_path)
    for step, temporary in ((1, False), (2, True), (3, True), (3, True)):
        save(folder, step, temporary=temporary)
    assert [checkpoint.name for checkpoint in folder.checkpoints()] == ["step-1", "step-3"]
    folder.checkpoints()[-1].verify()


def test_a_folder_that_is_not_shared_is_one_message(tmp_path, monkeypatch):
    """Each process would write its part to another disk, and every checkpoint would be sealed without it."""
    LocalFolder(tmp_path).prepare()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(local_folder, "_VISIBLE_AFTER_S", 0.0)
    LocalFolder(tmp_path).open(print)
    with monkeypatch.context() as patch:
        patch.setattr(local_folder, "same_everywhere", lambda names: False)  # others see other checkpoints
        with pytest.raises(ConfigError, match="is not the same for all processes"):
            LocalFolder(tmp_path).open(print)
    # As on a process whose disk has not the file that process 0 has just written.
    monkeypatch.setattr(local_folder, "broadcast_from_main", lambda token: token ^ 1)
    with pytest.raises(ConfigError, match=f"{tmp_path} is not the same for all processes"):
        LocalFolder(tmp_path).prepare()


def test_what_an_earlier_run_left_is_removed(tmp_path):
    (tmp_path / "step-1.unfinished" / "state").mkdir(parents=True)
    (tmp_path / "probe.unfinished").write_bytes(os.urandom(4))
    LocalFolder(tmp_path).prepare()
    assert list(tmp_path.iterdir()) == []
