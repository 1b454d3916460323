"""Remote files: a real HTTP server in a thread, and fsspec's own file systems."""

import dataclasses
import functools
import hashlib
import http.server
import json
import os
import sys
import threading
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from jaxlm.core.errors import ConfigError
from jaxlm.data.sources import mirror
from jaxlm.data.sources.files import sources_of
from jaxlm.data.tokens import TokensConfig
from tests.data.helpers import find_files


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, counts downloads, and can break the connection."""

    fetched: list[str]
    break_off = False

    def do_GET(self):
        self.fetched.append(self.path)
        super().do_GET()

    def copyfile(self, source, outputfile):
        if self.break_off:
            outputfile.write(source.read(10))
            self.close_connection = True
        else:
            super().copyfile(source, outputfile)

    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path):
    """A folder, the URL that serves it, and the handler."""
    pytest.importorskip("aiohttp")
    folder = tmp_path / "served"
    folder.mkdir()
    handler = type("Served", (Handler,), {"fetched": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def asked_anew():
    mirror.list_remote.cache_clear()


def files(*urls, folder: Path, log=lambda _: None):
    mirror.list_remote.cache_clear()  # simulates a new process
    return find_files(list(urls), "data.train_urls", "text", folder, log)


def listed(url):
    return [(source.name, source.num_bytes) for source in sources_of(url, "data.train_urls[0]", Path("mirror"), None)]


def texts(found):
    return [text for file in found for text in file.documents()]


class TestHttp:
    def test_files_are_listed_without_copying_and_copied_once(self, served, tmp_path):
        folder, address, handler = served
        for number in range(1, 4):
            (folder / f"x-{number}.jsonl").write_text(json.dumps({"text": f"text {number}"}) + "\n")
        url = f"{address}/x-{{1..3}}.jsonl"
        assert listed(url) == [(f"x-{number}.jsonl", 19) for number in range(1, 4)]
        assert handler.fetched == []
        logged: list[str] = []
        found = files(url, folder=tmp_path / "mirror", log=logged.append)
        assert texts(found) == ["text 1", "text 2", "text 3"]
        assert [file.name for file in found] == ["x-1.jsonl", "x-2.jsonl", "x-3.jsonl"]
        assert len(logged) == 3
        assert min(logged).startswith(f"mirror: {address}/x-1.jsonl: 0.0 MB copied to ")
        fetched = list(handler.fetched)
        assert [file.path for file in files(url, folder=tmp_path / "mirror")] == [file.path for file in found]
        assert handler.fetched == fetched

    def test_changed_files_are_copied_again(self, served, tmp_path):
        folder, address, _ = served
        (folder / "x.txt").write_text("one")
        assert texts(files(f"{address}/x.txt", folder=tmp_path / "mirror")) == ["one"]
        (folder / "x.txt").write_text("two")  # the same size
        os.utime(folder / "x.txt", (1, 1))
        assert texts(files(f"{address}/x.txt", folder=tmp_path / "mirror")) == ["two"]

    def test_globs_and_folders(self, served, tmp_path):
        folder, address, _ = served
        (folder / "deep").mkdir()
        for name in ("a.txt", "b.txt", "c.csv", "deep/d.py"):
            (folder / name).write_text(name)
        assert listed(f"{address}/*.txt") == [("a.txt", 5), ("b.txt", 5)]
        assert listed(f"{address}/") == [("a.txt", 5), ("b.txt", 5), ("deep/d.py", 9)]
        assert listed(f"{address}/{{deep/d.py,a.txt}}") == [("a.txt", 5), ("deep/d.py", 9)]
        assert texts(files(f"{address}/a.txt?download=true", folder=tmp_path / "mirror")) == ["a.txt"]

    def test_a_broken_connection_leaves_no_partial_file(self, served, tmp_path):
        folder, address, handler = served
        (folder / "x.txt").write_text("text " * 1000)
        handler.break_off = True
        with pytest.raises(ConfigError, match=rf"data\.train_urls\[0\]: '?{address}/x\.txt"):
            files(f"{address}/x.txt", folder=tmp_path / "mirror")
        assert [path.name for path in (tmp_path / "mirror").rglob("*") if path.is_file()] == [".lock"]
        handler.break_off = False
        assert texts(files(f"{address}/x.txt", folder=tmp_path / "mirror")) == ["text " * 1000]

    def test_missing_files_and_unreachable_servers(self, served):
        _, address, _ = served
        with pytest.raises(ConfigError, match=rf"data\.train_urls\[0\]: '{address}/no\.txt' cannot be read .*404"):
            listed(f"{address}/no.txt")
        with pytest.raises(ConfigError, match=r"'http://127\.0\.0\.1:1/x\.txt' cannot be read .*Check the address"):
            listed("http://127.0.0.1:1/x.txt")

    def test_suffixes_and_empty_files(self, served):
        folder, address, _ = served
        (folder / "c.csv").write_text("x")
        (folder / "e.txt").touch()
        with pytest.raises(ConfigError, match=r"c\.csv' has the suffix '\.csv'\. Allowed"):
            listed(f"{address}/c.csv")
        with pytest.raises(ConfigError, match=r"e\.txt' contains no text: 1 empty file"):
            listed(f"{address}/e.txt")


@pytest.fixture
def memory():
    """A folder in fsspec's in-memory file system."""
    name = "mirrored"
    fs = fsspec.filesystem("memory")
    fs.makedirs(f"/{name}/deep")
    yield f"memory://{name}", lambda path, text: fs.pipe_file(f"/{name}/{path}", text.encode())
    fs.rm(f"/{name}", recursive=True)


def test_memory(memory, tmp_path):
    address, write = memory
    write("b.txt", "b")
    write("deep/a.txt", "a")
    write("notes.md", "notes")
    assert listed(address) == [("b.txt", 1), ("deep/a.txt", 1)]
    assert listed(f"{address}/**/*.txt") == [("b.txt", 1), ("deep/a.txt", 1)]
    assert texts(files(f"{address}/**/*.txt", folder=tmp_path)) == ["b", "a"]
    write("b.txt", "c")
    assert texts(files(f"{address}/**/*.txt", folder=tmp_path)) == ["c", "a"]
    with pytest.raises(ConfigError, match=r"\*\.json' matches no readable file"):
        listed(f"{address}/*.json")


def test_a_file_that_changes_while_it_is_copied_is_not_recorded(memory, tmp_path, monkeypatch):
    address, write = memory
    write("x.txt", "one")
    copy, info = MemoryFileSystem.get_file, MemoryFileSystem.info

    def with_tag(self, path, **options):
        return info(self, path, **options) | {"ETag": hashlib.md5(self.cat_file(path)).hexdigest()}

    def change(self, path, local, **options):
        write("x.txt", "two")  # the same size
        copy(self, path, local, **options)

    data = TokensConfig(train_urls=[f"{address}/x.txt"], cache_dir=str(tmp_path), vocab_size=257)
    monkeypatch.setattr(MemoryFileSystem, "info", with_tag)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "get_file", change)
        with pytest.raises(ConfigError, match=r"x\.txt changed during the copy: was ETag .*, is now ETag"):
            data.identity()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]
    mirror.list_remote.cache_clear()
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "x.txt").write_text("two")
    assert data.identity() == dataclasses.replace(data, train_urls=[str(tmp_path / "local")]).identity()


def test_names_equal_those_of_a_local_copy(tmp_path):
    for name in ("text/b.txt", "text/deep/a.txt", "more/c.txt"):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_text(name)
    for pattern in ("text", "text/*.txt", "text/**/*.txt", "{text,more}/*.txt", "text/b.txt"):
        local = find_files([f"{tmp_path}/here/{pattern}"], "x", "text")
        there = files(f"file://{tmp_path}/here/{pattern}", folder=tmp_path / "mirror")
        assert [(f.name, f.digest) for f in there] == [(f.name, f.digest) for f in local], pattern
        assert all(tmp_path / "mirror" in file.path.parents for file in there)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for protocol in ("s3", "s3a"):  # fsspec remembers what earlier tests have opened
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    with pytest.raises(ConfigError, match=r"data\.train_urls\[0\]: 's3://b/x\.txt': s3:// needs .*pip install s3fs"):
        listed("s3://b/x.txt")


def test_progress_is_shown_while_a_file_is_copied(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_LOG_INTERVAL_S", -1.0)
    address, write = memory
    write("x.txt", "text " * 2_000_000)
    logged: list[str] = []
    files(f"{address}/x.txt", folder=tmp_path, log=logged.append)
    assert len(logged) > 2
    assert "x.txt: copying, " in logged[-2]
    assert logged[-2].endswith(" of 10.0 MB")


class TestDataConfig:
    @pytest.fixture
    def config(self, memory, tmp_path):
        address, write = memory
        write("a.txt", "some text to train on. " * 40)
        write("b.jsonl", json.dumps({"text": "more text"}) + "\n")
        return TokensConfig(train_urls=[address], cache_dir=str(tmp_path / "cache"), vocab_size=270)

    def test_checking_does_not_copy(self, config, tmp_path):
        config.check()
        assert not (tmp_path / "cache").exists()

    def test_a_cache_is_built_from_the_mirror(self, config, memory):
        logged: list[str] = []
        tokenizer = config.corpus.load_tokenizer(logged.append)
        first = config.open(tokenizer, 16, logged.append).train[""].cache
        assert [line.split(" ")[0] for line in logged] == ["mirror:", "mirror:", "training", "train:"]
        mirror.list_remote.cache_clear()
        config.check()
        assert config.open(tokenizer, 16, logged.append).train[""].cache.fingerprint == first.fingerprint
        assert len(logged) == 4
        memory[1]("a.txt", "other text")
        mirror.list_remote.cache_clear()
        config.check()  # the content is unknown before it is copied
        with pytest.raises(ConfigError, match=r"files changed: 1 \(a\.txt\)"):
            config.corpus.load_tokenizer(logged.append)
        with pytest.raises(ConfigError, match=r"files changed: 1 \(a\.txt\)"):
            config.check()

    def test_identity_does_not_depend_on_the_location(self, config, tmp_path):
        [address] = config.train_urls
        fs = fsspec.filesystem("memory")
        fs.get(address, str(tmp_path / "local"), recursive=True)
        local = TokensConfig(train_urls=[str(tmp_path / "local")], cache_dir="elsewhere", vocab_size=270)
        assert config.identity() == local.identity()

    def test_evaluating_other_text_reuses_the_copies(self, config, tmp_path):
        logged: list[str] = []
        config = dataclasses.replace(config, validation_urls=config.train_urls)
        tokenizer = config.corpus.load_tokenizer(logged.append)
        (first,) = config.open(tokenizer, 16, logged.append).validation
        (other,) = dataclasses.replace(config, enforce_eos=False).open_validation(
            tokenizer, 16, logged.append, separate_cache=True
        )
        assert first.examples.cache.fingerprint != other.examples.cache.fingerprint
        assert tmp_path / "cache" / "evaluate" in other.examples.cache.folder.parents
        assert sum(line.startswith("mirror:") for line in logged) == 2  # two files, each copied once
        assert [path.parent.name for path in (tmp_path / "cache").rglob("mirror")] == ["cache"]
