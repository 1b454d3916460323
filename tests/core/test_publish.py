"""Folders that are written as a whole, on a disk and at a URL (fsspec's memory file system)."""

import errno
import os
import platform
import subprocess

import fsspec
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.publish import (
    PublishError,
    check_folder_writable,
    check_unused,
    child_of,
    is_taken,
    location_of,
    publish_folder,
)


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    if fs.exists("/exports"):
        fs.rm("/exports", recursive=True)


def write(folder) -> None:
    with publish_folder(folder, "last.json") as unfinished:
        (unfinished / "weights").write_bytes(b"12")
        (unfinished / "last.json").write_text("{}")
        (unfinished / "tokenizer").mkdir()
        (unfinished / "tokenizer" / "x").write_text("x")


def test_a_url_gets_every_file_and_the_last_one_last(memory, monkeypatch):
    sent: list[str] = []
    put = type(memory).put_file
    monkeypatch.setattr(
        type(memory), "put_file", lambda fs, local, remote: (sent.append(remote), put(fs, local, remote))[1]
    )
    folder = child_of(location_of("memory://exports/mine/"), "step-4")
    assert folder == "memory://exports/mine/step-4"
    assert not is_taken(folder, "last.json")
    write(folder)
    assert sorted(sent) == [f"/exports/mine/step-4/{name}" for name in ("last.json", "tokenizer/x", "weights")]
    assert sent[-1].endswith("last.json")
    assert memory.cat_file("/exports/mine/step-4/weights") == b"12"
    assert is_taken(folder, "last.json")
    with pytest.raises(ConfigError, match=r"memory://exports/mine/step-4 already exists"):
        check_unused(folder, "last.json")


def test_the_rest_of_an_interrupted_upload_is_written_over(memory):
    memory.pipe_file("/exports/step-1/weights", b"1")
    assert not is_taken("memory://exports/step-1", "last.json")
    write("memory://exports/step-1")
    assert memory.cat_file("/exports/step-1/weights") == b"12"


def test_a_failed_upload_says_why(memory, monkeypatch):
    monkeypatch.setattr(type(memory), "put_file", lambda *_, **__: (_ for _ in ()).throw(OSError("quota exceeded")))
    with pytest.raises(PublishError, match=r"cannot upload to memory://exports/x \(.*quota exceeded"):
        write("memory://exports/x")


def test_a_folder_on_the_disk_appears_at_once(tmp_path):
    folder = location_of(str(tmp_path / "mine"))
    with publish_folder(folder, "last.json") as unfinished:
        (unfinished / "weights").write_bytes(b"12")
        assert not (tmp_path / "mine").exists()
    assert (tmp_path / "mine" / "weights").read_bytes() == b"12"
    assert is_taken(folder, "last.json")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_disk_that_cannot_be_written_is_one_message_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishError, match=r"cannot write .*file/step-1 \(.*Not a directory|File exists"):
        write(tmp_path / "file" / "step-1")
    with (
        pytest.raises(PublishError, match=r"cannot write .*step-1 \(\[Errno 28\] No space left on device\)\. Free up"),
        publish_folder(tmp_path / "step-1", "last.json"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_whether_a_folder_can_be_written_is_known_before_and_nothing_is_left(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        PublishError, match=r"cannot write .*/a/b \(no folder can be made in .*file: Not a directory\)\. Choose"
    ):
        check_folder_writable(tmp_path / "file" / "a" / "b")
    check_folder_writable(tmp_path / "new" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_killed_processes_left_is_removed_and_what_others_write_is_not(tmp_path):
    """A process that is killed while it writes removes nothing, and in a container the next one may have its number."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f".step-1.{platform.node()}-{number}.unfinished" for number in (ended.pid, os.getpid(), os.getppid())]
    elsewhere = f".step-1.other-host-{ended.pid}.unfinished"
    for name in (*names, elsewhere):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("x")
    write(tmp_path / "step-1")
    assert sorted(path.name for path in (tmp_path / "step-1").iterdir()) == ["last.json", "tokenizer", "weights"]
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", names[-1], elsewhere}
