"""A log file whose disk is full, or which someone deletes: every line is in it at the end, and the run hears of it once."""

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import threading

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.engine.checkpoint.lease import LeaseLostError
from jaxlm.observe import log_file
from jaxlm.observe.log_file import LogFile
from jaxlm.observe.records import check_rewritable
from jaxlm.observe.trackers import JsonlTracker, read_jsonl


def test_lines_wait_while_the_disk_is_full(tmp_path, monkeypatch):
    path, heard = tmp_path / "log", []
    file = LogFile(path, heard.append)
    file.append("1\n")
    file.flush()
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(log_file.os, "write", full)
        for number in (2, 3):
            file.append(f"{number}\n")
            file.flush()
    assert path.read_text() == "1\n"
    (warning,) = heard
    assert "cannot be written (No space left on device)" in warning
    file.append("4\n")
    file.close()
    assert path.read_text() == "1\n2\n3\n4\n"
    assert heard[1:] == [f"{path} is written again"]


@pytest.mark.slow
def test_a_line_that_a_real_limit_cuts_off_is_completed(tmp_path):
    """The operating system itself refuses the write, in the middle of a line."""
    program = f"""
    import resource, signal
    from pathlib import Path
    from jaxlm.observe.log_file import LogFile
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path = Path({str(tmp_path / "log")!r})
    file = LogFile(path, print)
    resource.setrlimit(resource.RLIMIT_FSIZE, (25, resource.RLIM_INFINITY))
    for number in range(10):
        file.append(f"line {{number}}\\n")
        file.flush()
    print(path.read_text()[-4:])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    file.close()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot be written (File too large)") == 1
    assert "line" in done.stdout.splitlines()[1]  # the file ended within a line
    assert (tmp_path / "log").read_text() == "".join(f"line {number}\n" for number in range(10))


def test_a_deleted_folder_comes_back_with_every_line(tmp_path):
    path, heard = tmp_path / "logs" / "run" / "log", []
    file = LogFile(path, heard.append)
    for number in range(5):
        file.append(f"{number}\n")
        file.flush()
        if number == 2:
            shutil.rmtree(tmp_path / "logs")
    file.close()
    assert path.read_text() == "0\n1\n2\n3\n4\n"
    assert heard == []


def test_lines_that_are_missing_at_the_end_are_counted(tmp_path):
    path, heard = tmp_path / "logs" / "log", []
    file = LogFile(path, heard.append)
    file.append("0\n")
    file.flush()
    shutil.rmtree(path.parent)
    path.parent.write_text("a file where the folder was")
    file.append("1\n2\n")
    file.close()
    assert len(heard) == 2
    assert "lines are missing" in heard[-1]


@pytest.mark.parametrize(
    "content", [b"\xff\x00\n", b"5\n", b"[" * 100_000 + b"\n", b'{"loss": 3}\n', b'{"step": "x"}\n']
)
def test_foreign_lines_are_kept_aside(tmp_path, content):
    path, heard = tmp_path / "metrics.jsonl", []
    whole = b'{"step": 1, "x": 2.0}\n' + content + b'{"step": 2, "x": 3.0}\n{"step": 3, "x'
    path.write_bytes(whole)
    JsonlTracker(path, resume_step=2, warn=heard.append).close()
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == whole
    assert f"warning: 1 lines of {path} are not records" in heard[0]
    path.write_bytes(content)
    JsonlTracker(path, resume_step=2, warn=heard.append).close()
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == whole
    assert (tmp_path / "metrics.jsonl.damaged.2").read_bytes() == content


def test_a_folder_in_the_place_of_the_metrics_is_a_message(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(
        ConfigError, match=r"trainer.log_dir: .*metrics.jsonl cannot be read and written \(Is a directory\)"
    ):
        JsonlTracker(tmp_path / "metrics.jsonl", resume_step=0)


def test_files_of_an_earlier_start_are_checked_and_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "decisions.jsonl"
    check_rewritable(tmp_path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("not a record\n")
    check_rewritable(tmp_path)
    assert path.read_text() == "not a record\n"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(
        ConfigError, match=r"trainer\.log_dir: .*decisions\.jsonl cannot be .* \(it is not a regular file\)"
    ):
        check_rewritable(tmp_path)
    path.unlink()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=rf"trainer\.log_dir: {tmp_path} cannot be .* \(Permission denied\)"):
        check_rewritable(tmp_path)


def test_a_flush_to_a_stalled_disk_blocks_no_other_thread(tmp_path, monkeypatch):
    file = LogFile(tmp_path / "lines.txt", print)
    stalls, goes_on, fsync = threading.Event(), threading.Event(), os.fsync

    def stalling(descriptor: int) -> None:
        stalls.set()
        goes_on.wait(60)
        fsync(descriptor)

    file.append("first\n")
    monkeypatch.setattr(os, "fsync", stalling)
    flushing = threading.Thread(target=file.flush)
    flushing.start()
    stalls.wait(60)
    lines = [f"line {number}\n" for number in range(3000)]
    for line in lines:
        file.append(line)
    file.flush(sync=False)
    assert flushing.is_alive()
    goes_on.set()
    flushing.join()
    file.close()
    assert (tmp_path / "lines.txt").read_text() == "first\n" + "".join(lines)


def test_a_process_that_has_lost_its_run_writes_no_line_more(tmp_path):
    """Another start has the files: its lines and those would be of the same steps."""
    path, lost = tmp_path / "metrics.jsonl", []

    def check_lease():
        if lost:
            raise LeaseLostError("another start has taken the run")

    tracker = JsonlTracker(path, resume_step=0, check_lease=check_lease)
    tracker.log(1, {"train/loss": 2.0})
    tracker.flush()
    lost.append(True)
    tracker.log(2, {"train/loss": 1.0})
    for write in (tracker.flush, tracker.close, lambda: tracker.log_decision(2, "plateau", {"event": "lowered"})):
        with pytest.raises(LeaseLostError, match="another start"):
            write()
    assert path.read_text() == '{"step": 1, "train/loss": 2.0}\n'
