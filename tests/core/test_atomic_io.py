"""Temporary names that do not collide, and folders that are complete or absent, on a disk that several hosts share."""

import errno
import fcntl
import os
import platform
import tempfile
import threading

import pytest

from jaxlm.core import safe_io as atomic_io
from jaxlm.core.errors import ConfigError


def test_two_hosts_never_use_the_same_temporary_name(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in containers, where process ids are not unique
    names = set()
    for host in ("one", "two", "two"):
        monkeypatch.setattr(platform, "node", lambda host=host: host)
        with atomic_io.atomic_file(tmp_path / "x.txt") as unfinished:
            names.add(unfinished.name)
            unfinished.write_text(host)
    assert len(names) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_only_this_hosts_leftovers_are_removed(tmp_path, monkeypatch):
    left = {}
    for host in ("one", "two"):
        monkeypatch.setattr(platform, "node", lambda host=host: host)
        left[host] = [atomic_io.temporary_path(tmp_path / "x"), atomic_io.temporary_path(tmp_path / "xy")]
        left[host][0].mkdir()
        left[host][1].write_text("")
    atomic_io.remove_leftovers(tmp_path / "x")
    assert sorted(tmp_path.iterdir()) == sorted([*left["one"], left["two"][1]])


def test_a_folder_is_complete_or_absent(tmp_path):
    def fail():
        with atomic_io.atomic_folder(tmp_path / "f") as unfinished:
            unfinished.mkdir()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []
    with atomic_io.atomic_folder(tmp_path / "f") as unfinished:
        unfinished.mkdir()
        (unfinished / "a").write_text("a")
    assert [path.name for path in tmp_path.rglob("*")] == ["f", "a"]


def test_the_folder_of_the_faster_host_is_kept(tmp_path):
    with atomic_io.atomic_folder(tmp_path / "f") as unfinished:
        for folder, content in ((tmp_path / "f", "theirs"), (unfinished, "ours")):
            folder.mkdir()
            (folder / "a").write_text(content)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f" / "a").read_text() == "theirs"


@pytest.fixture
def lustre(tmp_path, monkeypatch):
    """A folder whose file system has no locks, beside the folder of temporary files."""
    flock, folder = fcntl.flock, tmp_path / "lustre"
    folder.mkdir()

    def without_locks(file, operation):
        if os.readlink(f"/proc/self/fd/{file.fileno()}").startswith(str(folder)):
            raise OSError(errno.ENOSYS, "Function not implemented")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", without_locks)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return folder


def test_folders_of_a_file_system_without_locks_are_still_written_by_one_at_a_time(lustre):
    """A file of the local disk is locked instead."""
    waits, inside = threading.Event(), []

    def second():
        with atomic_io.folder_lock(lustre, lambda _: waits.set()):
            inside.append("second")

    with atomic_io.folder_lock(lustre, lambda _: None):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(60)
        inside.append("first")
    thread.join(60)
    assert inside == ["first", "second"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_lock_that_fails_is_an_error_and_no_file_system_without_locks(tmp_path, monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    message = rf"{tmp_path}/\.lock cannot be locked \({os.strerror(number)}\)"
    with pytest.raises(ConfigError, match=message), atomic_io.folder_lock(tmp_path, print):
        pass


def test_locks_are_not_kept_where_other_users_could_change_them(lustre, tmp_path, monkeypatch):
    stand_ins = tmp_path / f"jaxlm-locks-{os.getuid()}"

    def refused():
        with pytest.raises(ConfigError, match=f"{stand_ins}: .* or set TMPDIR"), atomic_io.folder_lock(lustre, print):
            pass

    (tmp_path / "elsewhere").mkdir(mode=0o700)
    stand_ins.symlink_to(tmp_path / "elsewhere")
    refused()
    stand_ins.unlink()
    stand_ins.write_text("")
    refused()
    stand_ins.unlink()
    stand_ins.mkdir()
    stand_ins.chmod(0o777)
    refused()
    stand_ins.chmod(0o700)
    with atomic_io.folder_lock(lustre, print):
        pass
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    (tmp_path / "jaxlm-locks-4321").mkdir(mode=0o700)  # another user has made it
    stand_ins = tmp_path / "jaxlm-locks-4321"
    refused()
