"""What is read of files that a run has not just written has an end: of pipes, devices, endless lines and bombs."""

import bz2
import gzip
import io
import lzma
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest

from jaxlm.core import safe_io
from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import (
    DISK_FULL_ERRNOS,
    UnreadableFileError,
    map_array,
    read_bytes,
    read_json_object,
    read_lines,
    read_stored,
    read_text,
)
from jaxlm.data.sources.document_files import read_documents
from jaxlm.data.sources.record_files import read_records
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from jaxlm.engine.checkpoint.manifest import DamagedError, seal, verify
from jaxlm.interop.hf.safetensors_file import SafetensorsFile
from jaxlm.observe.ledger import read_lines as read_ledger
from jaxlm.observe.logged_run import read_run
from jaxlm.observe.records import METRICS, parse_jsonl, read_metrics
from jaxlm.observe.trackers.jsonl import JsonlTracker
from jaxlm.reading.yaml import load_yaml
from tests.data.helpers import small_tokenizer

SOURCES = Path(safe_io.__file__).parents[1]
LIMIT = 10_000
DEVICE = Path("/dev/zero")
# Files of the package itself, of Python and of the kernel, and what this run has just written.
TRUSTED = {
    *("reading/recipes.py", "reading/choices.py", "engine/preemption.py", "engine/activity.py"),
    *("engine/checkpoint/lease.py", "core/devices.py", "data/sources/stdlib.py", "data/annotations.py"),
    "data/sources/tasks/pass_keys.py",
    *("session/run.py", "core/safe_io.py", "systems/rl/rewards/supervisor.py"),
}


@pytest.fixture
def small_limits(monkeypatch):
    """The most bytes that are held in memory, and of small files: `LIMIT`."""
    monkeypatch.setattr(safe_io, "largest", lambda: LIMIT)


def tracker(folder: Path):
    return JsonlTracker(folder / METRICS, resume_step=0)


# What reads a file, and the file's name.
READERS = {
    "JSON": (read_json_object, "config.json"),
    "YAML": (load_yaml, "run.yaml"),
    "tokenizer": (lambda path: load_tokenizer(str(path)), "tokenizer.json"),
    "template": (lambda path: ChatTemplate.load(str(path), small_tokenizer(), "key"), "a.jinja"),
    "text": (lambda path: list(read_documents(path, "text")), "a.txt"),
    "JSON lines": (lambda path: list(read_documents(path, "text")), "a.jsonl"),
    "records": (lambda path: list(read_records(path, ["a"])), "a.jsonl"),
    "list of records": (lambda path: list(read_records(path, ["a"])), "a.json"),
    "safetensors": (SafetensorsFile, "a.safetensors"),
    "report": (lambda path: read_run(str(path.parent)), METRICS),
    "metrics": (read_metrics, METRICS),
    "tracker": (lambda path: tracker(path.parent), METRICS),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_refused_and_not_waited_for(reader, tmp_path):
    read, name = READERS[reader]
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=r"not a regular file|no tokenizer\.json found"):
        read(tmp_path / name)


@pytest.mark.parametrize("reader", [name for name in READERS if name not in ("safetensors", "YAML", "template")])
def test_a_file_without_an_end_is_refused(reader, tmp_path, small_limits):
    read, name = READERS[reader]
    (tmp_path / name).write_bytes(b'{"step": 1}' * LIMIT)
    with pytest.raises(ConfigError, match=rf"(it|line 1) has more than {LIMIT:,} bytes"):
        read(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(DEVICE)
    with pytest.raises(ConfigError, match=r"not a regular file|no tokenizer\.json found"):
        read(tmp_path / name)


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
@pytest.mark.parametrize("kind", ["txt", "json", "jsonl"])
def test_a_bomb_is_refused(kind, suffix, compress, tmp_path, small_limits):
    bomb = tmp_path / f"a.{kind}.{suffix}"
    bomb.write_bytes(compress(b" " * 300 * LIMIT))
    assert bomb.stat().st_size < LIMIT
    with pytest.raises(
        ConfigError, match=rf"{re.escape(str(bomb))}: (it|line 1) has more than {LIMIT:,} bytes\. Replace"
    ) as refused:
        list(read_documents(bomb, "text"))
    assert refused.value.errno not in DISK_FULL_ERRNOS, "no advice to free space"


def test_too_little_memory_is_a_message():
    class Exhausted(io.BytesIO):
        def read(self, size=-1):
            raise MemoryError

    with pytest.raises(ConfigError, match=r"a\.txt: it needs more memory than there is\. Replace the file"):
        safe_io.read_stream(Exhausted(), "a.txt")


def test_memory_is_reserved_for_what_there_is():
    """`read(n)` of a file reserves n bytes, which a limit of the system may refuse."""
    asked = []

    class Asked(io.BytesIO):
        def read(self, size=-1):
            asked.append(size)
            return super().read(size)

    assert safe_io.read_stream(Asked(b"ab"), "a.txt", 1 << 40) == b"ab"
    assert max(asked) <= 16 << 20


def test_what_fits_is_read_as_it_is(tmp_path):
    content = b"a\r\nb\rc\n\xc3\xa9"
    (tmp_path / "a").write_bytes(content)
    assert read_bytes(tmp_path / "a", len(content)) == content
    assert read_text(tmp_path / "a") == (tmp_path / "a").read_text(encoding="utf-8")
    assert list(read_lines(io.BytesIO(content), "a")) == [b"a\r\n", b"b\rc\n", b"\xc3\xa9"]
    with pytest.raises(UnreadableFileError, match=r"a: it has more than 3 bytes\."):
        read_bytes(tmp_path / "a", 3)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "b")
    with pytest.raises(UnreadableFileError, match="Is a directory"):
        read_bytes(tmp_path)


def test_a_store_is_asked_for_the_size_first(tmp_path, small_limits):
    import fsspec

    (tmp_path / "a").write_bytes(b"a" * LIMIT)
    fs = fsspec.filesystem("file")
    assert read_stored(fs, str(tmp_path / "a")) == b"a" * LIMIT
    with (tmp_path / "a").open("ab") as file:
        file.write(b"a")
    with pytest.raises(UnreadableFileError, match=rf"it has more than {LIMIT:,} bytes"):
        read_stored(fs, str(tmp_path / "a"))


def test_a_checkpoint_with_a_pipe_is_damaged(tmp_path):
    (tmp_path / "a").write_text("a")
    seal(tmp_path)
    verify(tmp_path)
    (tmp_path / "a").unlink()
    os.mkfifo(tmp_path / "a")
    with pytest.raises(DamagedError, match="it is not a regular file"):
        verify(tmp_path)


def test_many_short_lines_and_a_ledger_that_is_a_device(tmp_path):
    assert parse_jsonl(b"\n" * 1000 + b'{"step": 1}\n') == ([{"step": 1}], 1000)
    (tmp_path / "goodput.jsonl").symlink_to(DEVICE)
    assert read_ledger(tmp_path) == []


def test_a_tokenizer_without_tokens_is_refused(tmp_path):
    import tokenizers
    from tokenizers import models

    tokenizers.Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer: '.*tokenizer\.json' has no tokens: its vocabulary is empty"
    ):
        load_tokenizer(str(tmp_path))


def test_arrays_with_a_damaged_header_are_one_message(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(1000).reshape(10, 100))
    whole, refused = path.read_bytes(), 0
    np.testing.assert_array_equal(map_array(path), np.arange(1000).reshape(10, 100))
    for seed in range(300):
        chooser, content = random.Random(seed), bytearray(whole)
        for _ in range(chooser.choice([1, 2, 5])):
            content[chooser.randrange(128)] = chooser.choice(b"()[]{}'\"0129,: <>|fiOU\\\n\x00\xff")
        path.write_bytes(content)
        try:
            map_array(path)
        except ConfigError:
            refused += 1
    assert refused > 200
    np.savez(path.with_suffix(".npz"), a=np.arange(3))
    with pytest.raises(ConfigError, match="an archive of several"):
        map_array(path.with_suffix(".npz"))


def test_nothing_else_reads_formats_whose_readers_trust_the_file():
    """Readers in C++ and numpy's: what checks their input is in one place for each."""
    trusting = re.compile(r"memory_map\(|OSFile\(|ParquetFile\(|torch\.load\(|np\.load\(|from_file\(str")
    own = {"data/cache/build.py"}
    checked = {"core/safe_io.py", "data/sources/document_files.py", "data/tokenizer/tokenizer.py"}
    checked |= {"interop/torch/torch_file.py", "observe/profiler.py"}
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if trusting.search(path.read_text(encoding="utf-8"))
    }
    assert found == own | checked


def test_nothing_else_reads_whole_files():
    """`core/safe_io.py` is the one place."""
    unbounded = re.compile(r"\.read_(text|bytes)\(|json\.load\(|stream\.read\(\)")
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if unbounded.search(path.read_text(encoding="utf-8"))
    }
    assert found <= TRUSTED, "read them with jaxlm.core.safe_io"
