"""Checkpoints on a disk: what is replaced, and a disk that the processes do not share."""

import fcntl
import os
import shutil
import time
from pathlib import Path

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.engine.checkpoint import local as local_module
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manifest import Cursor
from jaxlm.engine.checkpoint.restore import latest_valid, resolve_checkpoints, while_it_exists
from jaxlm.engine.checkpoint.staging import StagedFolder
from jaxlm.engine.checkpoint.store import CURSOR


def save(folder: LocalFolder, step: int, *, temporary: bool, entering: str | None = None) -> str:
    cursor = Cursor(step, int(entering is not None), entering or "train", entering is not None, temporary)
    folder.begin(cursor.folder_name, {CURSOR: cursor.to_json()})
    folder.commit(cursor.folder_name)
    return cursor.folder_name


def test_a_folder_that_is_not_shared_is_one_message(tmp_path, monkeypatch):
    """Each process would write its part to its own disk, and every checkpoint would be committed incomplete."""
    LocalFolder(tmp_path).prepare()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(local_module, "_VISIBLE_AFTER_S", 0.0)
    LocalFolder(tmp_path).open(print)
    with monkeypatch.context() as patch:
        patch.setattr(
            local_module, "same_on_all_processes", lambda names: False
        )  # the other processes see other checkpoints
        with pytest.raises(ConfigError, match=r"checkpointer\.base_path: .* is not the same on all processes"):
            LocalFolder(tmp_path).open(print)
        with pytest.raises(ConfigError, match=r"checkpointer\.staging_dir: .* is not the same on all processes"):
            StagedFolder("memory://store/shared", tmp_path).open(print)
    # Simulates a process whose disk lacks the file that process 0 has just written.
    monkeypatch.setattr(local_module, "broadcast_from_main", lambda token: token ^ 1)
    with pytest.raises(ConfigError, match=f"{tmp_path} is not the same on all processes"):
        LocalFolder(tmp_path).prepare()


def test_leftovers_of_an_earlier_run_are_removed(tmp_path):
    (tmp_path / "step-1.unfinished" / "state").mkdir(parents=True)
    (tmp_path / "probe.unfinished").write_bytes(b"half")
    LocalFolder(tmp_path).prepare()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("phase", [None, "sft", "step.2"])
def test_incomplete_folders_are_not_checkpoints_for_any_phase_name(tmp_path, phase):
    """Otherwise the run would find no complete checkpoint after a kill or damage, not even the previous one."""
    folder, logged = LocalFolder(tmp_path), []
    save(folder, 9, temporary=False)
    name = save(folder, 10, temporary=True, entering=phase)
    (tmp_path / name).rename(tmp_path / f"{name}.unfinished")
    assert latest_valid(folder, logged.append).checkpoint.name == "step-9"
    assert logged == []
    for aside in (f"{name}.damaged", f"{name}.damaged.2"):
        save(folder, 10, temporary=True, entering=phase)
        assert [checkpoint.name for checkpoint in resolve_checkpoints(str(tmp_path), tmp_path)] == ["step-9", name]
        (tmp_path / name / CURSOR).write_bytes(b"")
        assert latest_valid(folder, logged.append).checkpoint.name == "step-9"
        assert f"It was set aside as {aside};" in logged.pop()
    assert [checkpoint.name for checkpoint in folder.checkpoints()] == ["step-9"]


def test_a_second_start_of_a_run_is_refused_until_the_first_ends(tmp_path):
    first, second = LocalFolder(tmp_path / "run"), LocalFolder(tmp_path / "run")
    with (
        first.locked(print),
        pytest.raises(
            ConfigError, match=rf"already being trained \(process {os.getpid()} on .+ since 20.+ UTC\).*trainer.id"
        ),
    ):
        second.locked(print).__enter__()
    with second.locked(print):
        pass
    first.check_free()
    message = rf"already being trained \(process {os.getpid()} on .+ since 20.+ UTC\): both would save"
    with first.locked(print), pytest.raises(ConfigError, match=message):
        second.check_free()
    LocalFolder(tmp_path / "nowhere" / "run").check_free()
    assert not (tmp_path / "nowhere").exists()
    with first.locked(print), LocalFolder(tmp_path / "other").locked(print):
        pass


def test_a_start_at_the_same_moment_is_told_who_was_faster(tmp_path, monkeypatch):
    """The name is in the locked file a moment after it is locked."""
    path = tmp_path / ".run.lock"
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waited = []
        monkeypatch.setattr(time, "sleep", lambda _: (waited.append(1), len(waited) == 3 and path.write_text("Ada")))
        with pytest.raises(ConfigError, match=r"already being trained \(Ada\)"):
            LocalFolder(tmp_path / "run").locked(print).__enter__()
    with LocalFolder(tmp_path / "run").locked(print):
        pass


def test_a_folder_that_was_deleted_is_made_again_but_not_on_another_disk(tmp_path, monkeypatch):
    """Below the mount point of a disk that is gone, it would fill the disk of the operating system."""
    folder = LocalFolder(tmp_path / "disk" / "run")
    folder.prepare()
    save(folder, 1, temporary=False)
    shutil.rmtree(tmp_path / "disk")
    save(folder, 2, temporary=False)
    assert folder.names() == ["step-2"]
    shutil.rmtree(tmp_path / "disk" / "run")
    device = folder._device
    folder._device = -1  # as if this were the disk below the mount point
    with pytest.raises(OSError, match="the disk of this folder is no longer mounted"):
        save(folder, 3, temporary=False)
    assert list((tmp_path / "disk").iterdir()) == []
    folder._device = device
    save(folder, 3, temporary=False)
    folder._device = -1  # mounted again under another number: the newest checkpoint is there
    save(folder, 4, temporary=False)
    assert folder.names() == ["step-3", "step-4"]


def test_a_deletion_that_fails_does_not_fail_the_save_and_is_repeated(tmp_path, monkeypatch):
    folder = LocalFolder(tmp_path)
    save(folder, 1, temporary=True)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(OSError("no")))
        save(folder, 2, temporary=True)
    assert folder.names() == ["step-2"]
    assert len(list(tmp_path.iterdir())) == 2
    folder.tidy()
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_checkpoint_stays_if_the_one_that_replaces_it_cannot_be_renamed(tmp_path, monkeypatch):
    folder = LocalFolder(tmp_path)
    save(folder, 1, temporary=True)
    rename = os.rename

    def failing(source, target):
        if Path(source).name == "step-1.unfinished":
            raise OSError("no")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        with pytest.raises(OSError, match="no"):
            save(folder, 1, temporary=True)
    folder.tidy()
    assert folder.names() == ["step-1"]
    folder.checkpoints()[0].verify()


@pytest.mark.parametrize("target", ["/no/such/file", "cursor.json"])
def test_a_link_to_no_file_is_damage(tmp_path, target):
    """Otherwise the run could not go on from the checkpoint before."""
    folder, logged = LocalFolder(tmp_path), []
    save(folder, 9, temporary=False)
    name = save(folder, 10, temporary=False)
    (tmp_path / name / CURSOR).unlink()
    (tmp_path / name / CURSOR).symlink_to(target)
    found = latest_valid(folder, logged.append)
    assert found is not None
    assert found.checkpoint.name == "step-9"
    assert "step-10 is damaged" in logged[0]
    assert "is missing" in logged[0]


def test_a_checkpoint_that_was_moved_and_linked_is_replaced_like_others(tmp_path):
    folder = LocalFolder(tmp_path / "run")
    name = save(folder, 1, temporary=True)
    (tmp_path / "run" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    save(folder, 2, temporary=True)
    folder.tidy()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-2"]
    assert (tmp_path / "elsewhere" / CURSOR).is_file()


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_one_message(tmp_path):
    folder = LocalFolder(tmp_path)
    name = save(folder, 1, temporary=True)
    checkpoint, message = (
        folder.find(name),
        f"{name}: the checkpoint was deleted while it was read.*Run the command again",
    )
    save(folder, 2, temporary=True)
    with pytest.raises(ConfigError, match=message), while_it_exists(checkpoint):
        checkpoint.read(CURSOR)
    with pytest.raises(ValueError, match="another error"), while_it_exists(folder.find("step-2")):
        raise ValueError("another error")
