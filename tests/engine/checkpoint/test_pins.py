"""Pinned checkpoints, in every kind of folder."""

from pathlib import Path

import fsspec
import pytest

from jaxlm.engine.checkpoint.bucket import BucketFolder
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manifest import CHECKSUMS, Cursor, History
from jaxlm.engine.checkpoint.restore import newest_undamaged
from jaxlm.engine.checkpoint.staging import StagedFolder
from jaxlm.engine.checkpoint.store import CURSOR, CheckpointFolder

KINDS = {
    "local": LocalFolder,
    "bucket": lambda _: BucketFolder("memory://pins/bucket"),
    "staged": lambda path: StagedFolder("memory://pins/staged", path),
}


@pytest.fixture(params=KINDS)
def folder(request, tmp_path) -> CheckpointFolder:
    fs = fsspec.filesystem("memory")
    if fs.exists("/pins"):
        fs.rm("/pins", recursive=True)
    made = KINDS[request.param](tmp_path)
    if request.param == "staged":
        made.open(print)
    return made


def save(folder: CheckpointFolder, step: int, *, attempt: int = 0, abandoned: tuple[str, ...] = (), **pins: str) -> str:
    cursor = Cursor(step, 0, "train", False, True, History(attempt, pins=pins, abandoned=abandoned))
    folder.begin(cursor.folder_name, {CURSOR: cursor.to_json()})
    folder.commit(cursor.folder_name)
    return cursor.folder_name


def test_a_pinned_checkpoint_stays_until_the_newest_no_longer_pins_it(folder):
    save(folder, 1)
    save(folder, 2, best="step-1")
    save(folder, 3, best="step-1", before_streak="step-2")
    assert folder.names() == ["step-1", "step-2", "step-3"]
    save(folder, 4, best="step-2")
    assert folder.names() == ["step-2", "step-4"]
    save(folder, 1, attempt=1)
    assert folder.names() == ["step-1-attempt-1"]


def test_abandoned_checkpoints_are_neither_found_nor_deleted(folder):
    save(folder, 1)
    save(folder, 2, best="step-1")
    save(folder, 1, attempt=1, abandoned=("step-2",))
    assert folder.names() == ["step-2", "step-1-attempt-1"]
    found = folder.abandon("step-2")
    for step in (2, 3):
        save(folder, step, attempt=1)
    folder.prepare()
    assert folder.names() == ["step-3-attempt-1"]
    location = str(folder.location).removeprefix("memory:/")
    fs = fsspec.filesystem("memory" if location != str(folder.location) else "file")
    assert found.startswith("step-2")
    assert fs.exists(f"{location}/{found}")
    assert fs.exists(f"{location}/{found.partition('/')[0]}/{CURSOR}")


def test_an_older_checkpoint_is_found_and_a_damaged_one_passed_over(folder, tmp_path):
    for step in (1, 2, 3):
        save(folder, step, best="step-1", before_streak="step-2")
    found = newest_undamaged(folder, ["step-1", "step-2"], print)
    assert found is not None
    assert found.cursor.step == 2
    found.checkpoint.verify()
    damage(folder, "step-2", tmp_path)
    said: list[str] = []
    found = newest_undamaged(folder, ["step-1", "step-2"], said.append)
    assert found is not None
    assert found.cursor.step == 1
    assert "checkpoint step-2 is damaged" in said[0]
    assert newest_undamaged(folder, ["step-2"], said.append) is None


def damage(folder: CheckpointFolder, name: str, local: Path) -> None:
    """Changes the saved checksums of a checkpoint, wherever it is."""
    if isinstance(folder, LocalFolder):
        (local / name / CHECKSUMS).write_text("{}")
    else:
        fsspec.filesystem("memory").pipe_file(
            f"{str(folder.location).removeprefix('memory:/')}/{name}/{CHECKSUMS}", b"{}"
        )
