"""Token caches and tokenizers that machines share at a URL. The store is fsspec's memory file system."""

import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.cache.artifacts import Artifacts, DamagedError
from jaxlm.data.sources import mirror
from jaxlm.data.sources.mirror import RemoteFile
from jaxlm.data.tokens import TokensConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session import dry_run

URL = "memory://shared/cache"


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/shared", recursive=True)


def section(text, *, asked: bool = False, **keys) -> TokensConfig:
    """Args: asked: list remote text again, as a new process does."""
    if asked:
        mirror.list_remote.cache_clear()
    return decode(TokensConfig, ConfigSource({"train_urls": [str(text)], "cache_dir": URL, "vocab_size": 300, **keys}))


def machine(folder, monkeypatch):
    """Makes a folder the working folder, as of another machine that has nothing yet."""
    folder.mkdir()
    monkeypatch.chdir(folder)


def opened(data: TokensConfig) -> tuple[np.ndarray, list[str]]:
    """All tokens, and the lines that were logged."""
    lines: list[str] = []
    tokenizer = data.corpus.load_tokenizer(lines.append)
    examples = data.open(tokenizer, 16, lines.append).train[""]
    return examples.read(np.arange(len(examples)))["tokens"], lines


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a text of words " * 500)
    return path


@pytest.fixture
def built(text, tmp_path, monkeypatch, memory):
    """The tokens of a cache that the first machine has built."""
    machine(tmp_path / "one", monkeypatch)
    return opened(section(text))[0]


def test_the_first_machine_builds_and_the_second_reads_blocks(text, tmp_path, monkeypatch, memory):
    machine(tmp_path / "one", monkeypatch)
    built, said = opened(section(text))
    assert any("training a BPE tokenizer" in line for line in said)
    assert memory.exists("/shared/cache/train/cache.json")
    assert memory.exists("/shared/cache/tokenizer/made_from.json")
    again, said = opened(section(text))
    assert not any("sharing" in line or "copying" in line for line in said)
    machine(tmp_path / "two", monkeypatch)
    read, said = opened(section(text))
    np.testing.assert_array_equal(read, built)
    np.testing.assert_array_equal(again, built)
    assert sum("copying" in line for line in said) == 1  # the tokenizer
    assert not any("training a BPE" in line for line in said)
    assert f"data.cache_dir: {blocks_line(memory, 0)}" in said
    assert f"data.cache_dir: {blocks_line(memory, 1)}" in opened(section(text))[1]
    assert not list((tmp_path / "two").rglob("tokens.bin"))


def blocks_line(memory, share: float, limit: str = "50") -> str:
    size = memory.info("/shared/cache/train/tokens.bin")["size"] / 1e9
    return (
        f"{size:.3g} GB at {URL}/train, read in blocks of 0.262 MB; {size * share:.3g} GB of it in cache/blocks (at most"
        f" {limit} GB)"
    )


def test_a_cache_without_checksums_of_blocks_is_copied_and_gets_them(text, built, tmp_path, monkeypatch, memory):
    """An older version has built it."""
    sums = memory.cat_file("/shared/cache/train/blocks.crc32")
    memory.rm_file("/shared/cache/train/blocks.crc32")
    for name, changed in (("two", None), ("three", sums.replace(b'"tokens_crc32": ', b'"tokens_crc32": 1'))):
        machine(tmp_path / name, monkeypatch)
        if changed:
            memory.pipe_file("/shared/cache/train/blocks.crc32", changed)
        copied, said = opened(section(text))
        np.testing.assert_array_equal(copied, built)
        assert sum("copying" in line for line in said) == 2  # the tokenizer and the tokens
        assert memory.cat_file("/shared/cache/train/blocks.crc32") == sums


def test_a_cache_that_was_deleted_and_built_again_is_not_mixed_with_the_old_one(tmp_path, monkeypatch, memory):
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for number, text in enumerate(texts):
        text.write_text(f"a text of words {number} " * 500)
    machine(tmp_path / "two", monkeypatch)
    (tmp_path / "one").mkdir()
    for text in texts:
        monkeypatch.chdir(tmp_path / "one")
        built, _ = opened(section(text))
        monkeypatch.chdir(tmp_path / "two")
        read, said = opened(section(text))
        np.testing.assert_array_equal(read, built)
        assert any("read in blocks" in line for line in said)
        memory.rm("/shared/cache", recursive=True)
        shutil.rmtree(tmp_path / "one" / "cache")
        for tokenizer in (tmp_path / "two" / "cache").glob("*/tokenizer"):
            shutil.rmtree(tokenizer)


def test_a_truncated_cache_is_one_message_before_anything_is_read(text, built, tmp_path, monkeypatch, memory):
    path = "/shared/cache/train/tokens.bin"
    content = memory.cat_file(path)
    memory.pipe_file(path, content[:-2])
    machine(tmp_path / "two", monkeypatch)
    with pytest.raises(
        DamagedError, match=rf"{URL}/train/tokens\.bin: its size is .* instead of .*Delete the folder {URL}"
    ):
        opened(section(text))
    memory.pipe_file(path, content[:-2] + b"xx")
    with pytest.raises(DamagedError, match=rf"{URL}/train/tokens\.bin: bytes 0 to .*: its checksum does not match"):
        opened(section(text))


def test_the_mirror_has_a_limit(text, built, tmp_path, monkeypatch, memory):
    machine(tmp_path / "two", monkeypatch)
    for _ in range(2):
        read, said = opened(section(text, cache_mirror_gb=1e-7))
        np.testing.assert_array_equal(read, built)
        assert f"data.cache_dir: {blocks_line(memory, 0, '1e-07')}" in said


def test_a_dry_run_says_what_a_start_will_do(text, tmp_path, monkeypatch, memory):
    def said(data: TokensConfig) -> str:
        ((name, text),) = dry_run._caches(SimpleNamespace(data=(data, data)))
        assert name == "token cache train"
        return text

    (tmp_path / "two").mkdir()
    machine(tmp_path / "one", monkeypatch)
    folder = Artifacts.at(URL, "").folder / "train"
    assert said(section(text)) == (
        f"not built yet: the text is tokenized to {folder}, and the cache uploaded to {URL}/train"
    )
    assert said(section(text, cache_dir="c")) == "not built yet: the text is tokenized to c/train"
    assert [path.name for path in Path.cwd().iterdir()] == []
    opened(section(text))
    assert said(section(text)).endswith(f" GB in {folder}")
    monkeypatch.chdir(tmp_path / "two")
    assert said(section(text)) == blocks_line(memory, 0)
    opened(section(text))
    assert said(section(text)) == blocks_line(memory, 1)
    tokens = memory.cat_file("/shared/cache/train/tokens.bin")
    memory.pipe_file("/shared/cache/train/tokens.bin", tokens[:-2])
    assert said(section(text)).startswith("a start would end with: the token cache is damaged")
    memory.rm_file("/shared/cache/train/blocks.crc32")
    assert said(section(text)).endswith(
        f"GB at {URL}/train, without checksums of blocks, copied as a whole to {folder}"
    )
    answered = threading.Event()
    monkeypatch.setattr(dry_run, "_ANSWER_S", 0.01)

    def late(*_):
        answered.wait()
        raise FileNotFoundError

    monkeypatch.setattr(type(memory), "cat_file", late)
    assert said(section(text)) == f"not checked: {URL} has not answered for 0.01 s"
    answered.set()


def test_an_order_that_the_mirror_cannot_hold_is_warned_of(text, tmp_path, monkeypatch, memory):
    machine(tmp_path / "one", monkeypatch)
    data = section(text)
    assert data.open(data.corpus.load_tokenizer(print), 16, print).slow_sources() == []  # the whole cache is here
    machine(tmp_path / "two", monkeypatch)
    warned = {}
    for name, keys in {
        "ample": {},
        "small": {"cache_mirror_gb": 1e-7},
        "short eras": {"cache_mirror_gb": 1e-7, "shuffle": {"type": "era", "era_length": 3}},
        "long eras": {"cache_mirror_gb": 1e-7, "shuffle": {"type": "era", "era_length": 4}},
        "in order": {"cache_mirror_gb": 1e-7, "shuffle": False},
    }.items():
        data = section(text, **keys)
        warned[name] = len(data.open(data.corpus.load_tokenizer(print), 16, print).slow_sources())
    assert warned == {"ample": 0, "small": 1, "short eras": 0, "long eras": 1, "in order": 0}


def test_a_shared_cache_of_another_text_is_refused(text, built, tmp_path, monkeypatch):
    machine(tmp_path / "two", monkeypatch)
    text.write_text("another text " * 500)
    with pytest.raises(ConfigError, match=r"data\.cache_dir"):
        opened(section(text))


def test_a_source_can_have_a_url_of_its_own(text, tmp_path, monkeypatch, memory):
    machine(tmp_path / "one", monkeypatch)
    data = decode(
        TokensConfig,
        ConfigSource({"cache_dir": "local", "configs": {"a": {"train_urls": [str(text)], "cache_dir": f"{URL}/a"}}}),
    )
    data.open(data.corpus.load_tokenizer(print), 16, print)
    assert memory.exists("/shared/cache/a/train/cache.json")
    assert (tmp_path / "one" / "local" / "tokenizer").is_dir()


def test_an_unknown_protocol_is_refused_before_anything_is_read():
    with pytest.raises(ConfigError, match=r"data\.cache_dir: 'nowhere://x': fsspec does not support nowhere://"):
        Artifacts.at("nowhere://x", "data.cache_dir").check()


class TestRemoteText:
    """The text is in the store too. Whoever has read it says what it contains."""

    @pytest.fixture
    def text(self, memory):
        for number in range(3):
            memory.pipe_file(f"/shared/text/{number}.txt", f"a text of words {number} ".encode() * 200)
        return "memory://shared/text"

    @pytest.fixture
    def built(self, text, tmp_path, monkeypatch):
        machine(tmp_path / "one", monkeypatch)
        tokens, said = start(text)
        assert sum(line.startswith("mirror:") for line in said) == 3
        monkeypatch.setattr(RemoteFile, "_make_copy", no_copies)
        return tokens, section(text).identity()

    def test_other_machines_do_not_read_it(self, text, built, tmp_path, monkeypatch):
        machine(tmp_path / "two", monkeypatch)
        data = section(text)
        assert not (tmp_path / "two" / "cache").exists()
        assert data.identity() == built[1]  # which a resumed run compares
        np.testing.assert_array_equal(start(text)[0], built[0])
        assert not list((tmp_path / "two").rglob("*.txt"))

    def test_its_identity_is_that_of_a_local_copy(self, text, built, memory, tmp_path, monkeypatch):
        memory.get(text, str(tmp_path / "text"), recursive=True)
        machine(tmp_path / "two", monkeypatch)
        assert section(tmp_path / "text").identity() == built[1]
        np.testing.assert_array_equal(opened(section(tmp_path / "text"))[0], built[0])

    def test_text_that_has_changed_is_read_and_noticed(self, text, built, memory, tmp_path, monkeypatch):
        monkeypatch.undo()
        memory.pipe_file("/shared/text/1.txt", memory.cat_file("/shared/text/1.txt"))  # only its time has changed
        machine(tmp_path / "two", monkeypatch)
        assert section(text, asked=True).identity() == built[1]
        copied = [path.name for path in (tmp_path / "two").rglob("*.txt")]
        assert copied == ["1.txt"]
        memory.pipe_file("/shared/text/1.txt", b"other words " * 200)
        machine(tmp_path / "three", monkeypatch)
        assert section(text, asked=True).identity() != built[1]
        with pytest.raises(ConfigError, match=r"files changed: 1 \(1\.txt\)"):
            start(text)

    @pytest.mark.parametrize("content", [None, b"", b"[]", b"[" * 100_000, b'{"a": '])
    def test_without_the_ledger_it_is_read(self, text, built, memory, content, tmp_path, monkeypatch):
        """An older version has built the cache, or the file is damaged."""
        monkeypatch.undo()
        memory.rm_file("/shared/cache/text.json") if content is None else memory.pipe_file(
            "/shared/cache/text.json", content
        )
        machine(tmp_path / "two", monkeypatch)
        assert section(text).identity() == built[1]
        assert len(list((tmp_path / "two").rglob("*.txt"))) == 3
        assert len(json.loads(memory.cat_file("/shared/cache/text.json"))) == 3

    def test_a_server_that_reports_no_version(self, text, built, tmp_path, monkeypatch):
        monkeypatch.undo()
        monkeypatch.setattr(mirror, "_VERSION_FIELDS", ())
        machine(tmp_path / "two", monkeypatch)
        assert section(text, asked=True).identity() == built[1]
        assert len(list((tmp_path / "two").rglob("*.txt"))) == 3


def start(text) -> tuple[np.ndarray, list[str]]:
    """Opens the data, as a new process does."""
    mirror.list_remote.cache_clear()
    return opened(section(text))


def no_copies(*_):
    raise AssertionError("the text was copied")
