"""Log folders at a URL. The store is fsspec's memory file system, which tests make fail."""

import fsspec
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.observe.log_file import LogStore

URL = "memory://logs/run"


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    if fs.exists("/logs"):
        fs.rm("/logs", recursive=True)


def test_another_machine_continues_the_logs(tmp_path, memory):
    one, two = tmp_path / "one", tmp_path / "two"
    (one / "profile").mkdir(parents=True)
    (one / "metrics.jsonl").write_text("1\n2\n")
    (one / "profile" / "p.md").write_text("p")
    LogStore(URL, one, print).upload()
    store = LogStore(URL, two, print)
    store.fetch(replace=False)
    assert (two / "metrics.jsonl").read_text() == "1\n2\n"
    assert (two / "profile" / "p.md").read_text() == "p"
    with (two / "metrics.jsonl").open("a") as file:
        file.write("3\n")
    store.upload()
    first = LogStore(URL, one, print)
    first.fetch(replace=False)
    assert (one / "metrics.jsonl").read_text() == "1\n2\n"  # another process may be writing to it
    first.fetch(replace=True)
    assert (one / "metrics.jsonl").read_text() == "1\n2\n3\n"
    (one / "metrics.jsonl").write_text("1\n2\n3\n4\n")
    first.fetch(replace=True)
    assert (one / "metrics.jsonl").read_text() == "1\n2\n3\n4\n"


def test_an_upload_that_fails_is_one_warning_and_is_made_up_for(tmp_path, memory, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("1\n")
    said: list[str] = []
    store = LogStore(URL, tmp_path, said.append)
    with monkeypatch.context() as broken:
        broken.setattr(type(memory), "put_file", lambda *_, **__: (_ for _ in ()).throw(OSError("no route to host")))
        store.upload()
        store.upload()
    assert len(said) == 1
    assert "logs cannot be copied to memory://logs/run" in said[0]
    assert "no route to host" in said[0]
    store.upload()
    assert said[1:] == ["logs are copied to memory://logs/run again"]
    assert memory.cat_file("/logs/run/metrics.jsonl") == b"1\n"


def test_only_changed_files_are_uploaded(tmp_path, memory, monkeypatch):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    store = LogStore(URL, tmp_path, print)
    store.upload()
    (tmp_path / "b").write_text("12")
    sent: list[str] = []
    put = type(memory).put_file
    monkeypatch.setattr(
        type(memory), "put_file", lambda fs, local, remote: (sent.append(remote), put(fs, local, remote))[1]
    )
    store.upload()
    assert sent == ["/logs/run/b"]


def test_a_url_that_cannot_be_written_is_refused(tmp_path, monkeypatch, memory):
    monkeypatch.setattr(type(memory), "pipe_file", lambda *_, **__: (_ for _ in ()).throw(PermissionError("forbidden")))
    with pytest.raises(ConfigError, match=r"trainer\.log_dir: cannot write to 'memory://logs/run' \(.*forbidden"):
        LogStore(URL, tmp_path, print).check_writable()


def test_without_a_url_nothing_happens(tmp_path):
    store = LogStore(None, tmp_path / "absent", print)
    store.check_writable()
    store.fetch(replace=True)
    store.upload()
    assert not (tmp_path / "absent").exists()
