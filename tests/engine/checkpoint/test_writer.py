"""Saves in the background: what is written when, and by whom it is waited for."""

import asyncio
import gc
import shutil
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import haliax as hax
import jax.numpy as jnp
import pytest
from etils import epath

from jaxlm.core.stores import WHILE_TRAINING_S
from jaxlm.engine.checkpoint import writer as writing
from jaxlm.engine.checkpoint.lease import LeaseLostError
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manifest import Cursor
from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.checkpoint.store import SaveError
from jaxlm.engine.checkpoint.writer import CheckpointWriter, SaveHealth

Embed = hax.Axis("embed", 8)
STATE: Any = {"w": hax.arange(Embed), "b": hax.named(jnp.ones(8), Embed)}


def opened(
    path: Path, *, retry_for_s: float = 60.0, progress: Callable[[], None] = lambda: None
) -> tuple[LocalFolder, CheckpointWriter, list[str]]:
    folder, said = LocalFolder(path), []
    folder.prepare()
    health = SaveHealth(CheckpointerConfig(retry_for=timedelta(seconds=retry_for_s)), None, said.append)
    files = {"config.yaml": b"{}"}
    writer = CheckpointWriter(folder, files, health, said.append, lambda: None, progress=progress)
    return folder, writer, said


def cursor(step: int) -> Cursor:
    return Cursor(step, 0, "train", entering=False, temporary=False)


def test_nothing_is_written_if_a_checkpoint_cannot_be_begun(tmp_path):
    """TensorStore would make the folder again, on whatever disk is there."""
    folder, writer, said = opened(tmp_path / "disk")
    shutil.rmtree(tmp_path / "disk")
    folder._device = -1  # as if the disk were gone
    writer.start(STATE, cursor(1), {})
    assert writer.wait() is not None
    assert writer.has_failed
    assert "the disk of this folder is no longer mounted" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_waited_for_only_by_the_next_save(tmp_path, monkeypatch):
    goes_on, begin = threading.Event(), LocalFolder.begin
    monkeypatch.setattr(LocalFolder, "begin", lambda *arguments: (goes_on.wait(100), begin(*arguments)))
    monkeypatch.setattr(writing, "_PATIENCE_S", 0.1)
    folder, writer, said = opened(tmp_path)
    writer.start(STATE, cursor(1), {})
    assert writer.is_busy
    assert folder.names() == []

    def finish_once_it_is_mentioned() -> None:
        end = time.monotonic() + 60
        while not said and time.monotonic() < end:
            time.sleep(0.01)
        goes_on.set()

    threading.Thread(target=finish_once_it_is_mentioned).start()
    assert writer.wait() is None
    assert said == ["waiting for the save of step-1, which is still being written"]
    assert folder.names() == ["step-1"]
    folder.checkpoints()[0].verify()


def test_a_save_with_nothing_to_go_on_with_is_repeated(tmp_path, monkeypatch):
    progress: list[int] = []
    folder, writer, said = opened(tmp_path, progress=lambda: progress.append(len(tries)))
    commit, tries = LocalFolder.commit, []

    def committing(self, name):
        tries.append(name)
        if len(tries) < 3:
            raise RuntimeError("what a library raises")
        commit(self, name)

    monkeypatch.setattr(LocalFolder, "commit", committing)
    writer.save(STATE, cursor(1), {}, (0.1, 0.2, 0.3))
    assert folder.names() == ["step-1"]
    assert progress == [1, 2], "the watchdog knows of each further try"
    assert ["The next try is in 0.1 s" in said[0], "The next try is in 0.2 s" in said[1]] == [True, True]
    assert "RuntimeError: what a library raises" in said[0]
    monkeypatch.setattr(LocalFolder, "commit", lambda self, name: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(SaveError, match="no"):
        writer.save(STATE, cursor(2), {}, (0.0,))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.parametrize(("retry_for_s", "pauses"), [(0.0, []), (1.0, [0.5]), (10.0, [0.5, 1.0, 2.0, 4.0])])
def test_a_save_that_blocks_is_repeated_no_longer_than_retry_for(tmp_path, monkeypatch, retry_for_s, pauses):
    _, writer, said = opened(tmp_path, retry_for_s=retry_for_s)
    monkeypatch.setattr(LocalFolder, "commit", lambda self, name: (_ for _ in ()).throw(OSError("no")))
    slept: list[float] = []
    monkeypatch.setattr(writing, "time", SimpleNamespace(sleep=slept.append, time=time.time))
    with pytest.raises(SaveError, match="no"):
        writer.save(STATE, cursor(1), {}, WHILE_TRAINING_S)
    assert slept == pauses
    assert len(said) == len(pauses)


@pytest.mark.parametrize("text", ["/a/b", "gs://a/b"])
def test_a_path_can_be_awaited_more_than_once(text):
    """They share what they await. Without this, one save in 60 failed at a short switch interval."""
    path = writing._orbax_path(text)
    assert asyncio.run((path / "c").await_creation()).as_posix() == f"{text}/c"
    assert isinstance(path, epath.Path)
    assert type(path) is type(writing._orbax_path(f"{text}/d"))  # not another class for each save


def test_a_checkpoint_whose_parts_were_not_merged_is_not_finished(tmp_path, monkeypatch):
    """Orbax only warns if it cannot list them. Such a checkpoint would match its checksums, and could not be read."""
    folder, writer, said = opened(tmp_path)
    monkeypatch.setattr(writer._orbax, "finalize", lambda folder: None)
    writer.start(STATE, cursor(1), {})
    assert writer.wait() is not None
    assert "the parts of the checkpoint could not be listed" in said[0]
    assert folder.names() == []


@pytest.mark.parametrize(
    ("file", "is_shown"), [("/site-packages/orbax/checkpoint/handlers.py", False), ("/mine.py", True)]
)
def test_failed_orbax_tasks_are_reported_only_by_the_save(tmp_path, caplog, file, is_shown):
    """On a full disk many writes fail, and the first of them ends the save: nobody awaits the others."""
    opened(tmp_path)
    code = compile("async def write():\n    raise OSError(28, 'No space left on device')\n", file, "exec")
    scope: dict[str, Any] = {}
    exec(code, scope)

    async def several() -> None:
        tasks = [asyncio.ensure_future(scope["write"]()) for _ in range(2)]
        await asyncio.wait(tasks)

    asyncio.run(several())
    gc.collect()
    assert [record.name for record in caplog.records] == ["asyncio"] * 2 * is_shown


def test_a_paused_save_does_not_remove_what_another_start_is_writing(tmp_path, monkeypatch):
    """The other start has taken the folder, and has removed what the paused one had written, so that the save fails."""
    _, writer, said = opened(tmp_path)
    taken: list[int] = []

    def check_lease() -> None:
        if taken:
            raise LeaseLostError("another start has taken the folder")

    def merge_after_a_pause(*_arguments: Any) -> None:
        taken.append(1)
        shutil.rmtree(tmp_path / "step-1.unfinished")
        LocalFolder(tmp_path).begin("step-2", {"run/config.yaml": b"{}"})
        raise OSError("the parts of the checkpoint could not be listed")

    writer._check_lease = check_lease
    monkeypatch.setattr(writing, "BRIEFLY_S", ())
    monkeypatch.setattr(CheckpointWriter, "_merge", merge_after_a_pause)
    writer.start(STATE, cursor(1), {})
    with pytest.raises(LeaseLostError):
        writer.wait()
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-2.unfinished"]
    assert said == []
