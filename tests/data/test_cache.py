import collections
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.cache import build as build_module
from jaxlm.data.cache.artifacts import DamagedError, write_metadata
from jaxlm.data.cache.token_cache import TOKEN_CACHE, TokenCache, cache_key
from jaxlm.data.formats.documents import TextFormat
from tests.data.helpers import built, find_files, small_tokenizer, write_corpus

ROOT = Path(__file__).parents[2]
FILES = ("tokens.bin", "offsets.bin", "cache.json")


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture
def corpus(tmp_path):
    write_corpus(tmp_path / "text")
    return tmp_path / "text"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(build_module, "_SHARD_CHARACTERS", 300)


def check_rebuilt(tmp_path: Path, corpus: Path, tokenizer) -> None:
    """A build after one that did not end gives what one gives that was never interrupted."""
    build(tmp_path / "train", corpus, tokenizer)
    assert contents(tmp_path / "train") == contents(build(tmp_path / "other", corpus, tokenizer).folder)


def build(folder: Path, corpus: Path, tokenizer, *, bos=True, eos=True, log=lambda line: None) -> TokenCache:
    files = find_files([str(corpus)], "data.train_urls", "text")
    made_from = cache_key(files, tokenizer, bos=bos, eos=eos)
    return built(folder, files, TextFormat().encoder(tokenizer, bos=bos, eos=eos, key=""), made_from, log)


def open_or_build_files(folder: Path, files, tokenizer) -> None:
    encoder = TextFormat().encoder(tokenizer, bos=True, eos=True, key="")
    built(folder, files, encoder, cache_key(files, tokenizer, bos=True, eos=True), print)


def flipped(path: Path, number: int) -> Iterator[None]:
    """Flips one bit after another of a file, at places all over it."""
    raw = path.read_bytes()
    for place in np.linspace(0, len(raw) - 1, number).astype(int):
        damaged = bytearray(raw)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        yield


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (False, True), (True, False), (False, False)])
def test_stores_every_document_between_its_special_tokens(tmp_path, tokenizer, corpus, bos, eos):
    documents = write_corpus(corpus)
    cache = build(tmp_path / "cache" / "train", corpus, tokenizer, bos=bos, eos=eos)
    assert cache.num_bytes == sum(len(text.encode()) for text in documents)
    assert len(cache.offsets) == len(documents) + 1
    for number, text in enumerate(documents):
        ids = cache.tokens[cache.offsets[number] : cache.offsets[number + 1]].tolist()
        expected = tokenizer.encode_batch([text])[0]
        assert ids == [tokenizer.bos_id] * bos + expected + [tokenizer.eos_id] * eos
    assert cache.tokens.dtype == np.uint16


def test_finds_the_document_of_a_token(tmp_path, tokenizer, corpus):
    cache = build(tmp_path / "train", corpus, tokenizer)
    assert cache.source_of(0) == "document 1 of a.jsonl"
    assert cache.source_of(int(cache.offsets[6]) - 1) == "document 6 of a.jsonl"
    assert cache.source_of(int(cache.offsets[6])) == "document 1 of b0.txt"
    assert cache.source_of(cache.num_tokens - 1) == "document 1 of b5.txt"


def test_large_vocabularies_use_uint32(tmp_path, tokenizer, corpus, monkeypatch):
    monkeypatch.setattr(tokenizer, "vocab_size", (1 << 16) + 1)
    assert build(tmp_path / "wide", corpus, tokenizer).tokens.dtype == np.uint32
    monkeypatch.setattr(tokenizer, "vocab_size", 1 << 16)
    assert build(tmp_path / "narrow", corpus, tokenizer).tokens.dtype == np.uint16


def test_does_not_depend_on_shards_folders_or_the_current_folder(tmp_path, tokenizer, corpus, monkeypatch):
    expected = contents(build(tmp_path / "one", corpus, tokenizer).folder)
    monkeypatch.setattr(build_module, "_SHARD_CHARACTERS", 1 << 20)
    moved = shutil.copytree(corpus, tmp_path / "elsewhere" / "books")
    monkeypatch.chdir(moved.parent)
    assert contents(build(Path("two"), Path("books"), tokenizer).folder) == expected


class TestOtherCacheKey:
    """A cache of other data is refused with a list of the differences."""

    def refused(self, tmp_path, corpus, tokenizer, message, **options):
        with pytest.raises(ConfigError, match=message) as caught:
            build(tmp_path / "train", corpus, tokenizer, **options)
        assert "Choose another data.cache_dir, or delete this folder to rebuild it" in str(caught.value)
        assert not isinstance(caught.value, DamagedError)

    @pytest.fixture(autouse=True)
    def built(self, tmp_path, corpus, tokenizer):
        build(tmp_path / "train", corpus, tokenizer)

    def test_options(self, tmp_path, corpus, tokenizer):
        self.refused(tmp_path, corpus, tokenizer, r"enforce_eos: was True, is now False", eos=False)
        self.refused(tmp_path, corpus, tokenizer, r"enforce_bos: was True, is now False", bos=False)

    def test_tokenizer(self, tmp_path, corpus):
        message = r"(?s)tokenizer: was \w{12}\.\.\., is now .*vocab_size: was 320, is now 321"
        self.refused(tmp_path, corpus, small_tokenizer(321), message)

    def test_text_key(self, tmp_path, corpus, tokenizer):
        files = find_files([str(corpus)], "data.train_urls", "body")
        with pytest.raises(ConfigError, match="text_key: was text, is now body"):
            open_or_build_files(tmp_path / "train", files, tokenizer)

    def test_files(self, tmp_path, corpus, tokenizer):
        (corpus / "b1.txt").write_text("changed")
        self.refused(tmp_path, corpus, tokenizer, r"files changed: 1 \(b1\.txt\)")
        (corpus / "c.txt").write_text("new")
        (corpus / "b0.txt").unlink()
        self.refused(
            tmp_path, corpus, tokenizer, r"(?s)added: 1 \(c\.txt\).*removed: 1 \(b0\.txt\).*changed: 1 \(b1\.txt\)"
        )

    def test_order(self, tmp_path, corpus, tokenizer):
        files = find_files([str(corpus)], "data.train_urls", "text")[::-1]
        with pytest.raises(ConfigError, match="the order of the files"):
            open_or_build_files(tmp_path / "train", files, tokenizer)


def test_a_token_beyond_the_vocabulary(tmp_path, corpus, tokenizer):
    """Written with matching checksums, so only reading can detect it."""
    folder = build(tmp_path / "train", corpus, tokenizer).folder
    whole = TOKEN_CACHE.open(folder)
    tokens = np.array(whole.tokens)
    tokens[41] = 9999
    tokens.tofile(folder / "tokens.bin")
    about = dict(TOKEN_CACHE.at(folder).metadata)
    about["crc32"]["tokens.bin"] = zlib.crc32(tokens.tobytes())
    write_metadata(folder / "cache.json", about)
    broken = TOKEN_CACHE.open(folder)
    np.testing.assert_array_equal(broken.read(np.array([0, 42]), 41), whole.read(np.array([0, 42]), 41))
    with pytest.raises(DamagedError, match=r"tokens\.bin: token 41 \(document 1 of a\.jsonl\) is 9999.* has 320"):
        broken.read(np.array([0, 30]), 20)


def test_invalid_cache_folders_are_refused(tmp_path, corpus, tokenizer):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data\.cache_dir: .*file/cache cannot be created"):
        build(tmp_path / "file" / "cache" / "train", corpus, tokenizer)


def test_no_text_at_all(tmp_path, tokenizer):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ConfigError, match="contains no text: every record"):
        build(tmp_path / "train", tmp_path / "text", tokenizer)
    assert not (tmp_path / "train").exists()


def test_progress_is_shown(tmp_path, corpus, tokenizer, monkeypatch):
    monkeypatch.setattr(build_module, "_LOG_INTERVAL_S", -1.0)
    logged: list[str] = []
    build(tmp_path / "train", corpus, tokenizer, log=logged.append)
    assert len(logged) > 5
    assert " of 0.0 MB, 12 documents, " in logged[-2]


def interrupt(folder: Path, corpus: Path, tokenizer, monkeypatch) -> list[Path]:
    """Builds all shards of a cache without joining them."""

    def too_late(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "_join_shards", too_late)
        with pytest.raises(KeyboardInterrupt):
            build(folder, corpus, tokenizer)
    return sorted(folder.with_name(f"{folder.name}.building").glob("shard-*"))


def test_a_resumed_build_keeps_finished_shards(tmp_path, corpus, tokenizer, monkeypatch):
    shards = interrupt(tmp_path / "train", corpus, tokenizer, monkeypatch)
    assert len(shards) > 5
    damaged = bytearray(shards[2].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shards[2].write_bytes(damaged)
    encoded: list[list[str]] = []
    original = tokenizer.encode_arrays
    monkeypatch.setattr(tokenizer, "encode_arrays", lambda texts: encoded.append(texts) or original(texts))
    read: collections.Counter[str] = collections.Counter()
    read_shard = build_module._read_shard
    monkeypatch.setattr(build_module, "_read_shard", lambda path: read.update([path.name]) or read_shard(path))
    build(tmp_path / "train", corpus, tokenizer)
    assert len(encoded) == 1  # the damaged one
    assert set(read.values()) == {2}, "once to see whether it is damaged, and once to join it to the others"
    assert contents(tmp_path / "train") == contents(build(tmp_path / "other", corpus, tokenizer).folder)


def test_any_damage_to_a_shard_is_detected(tmp_path, corpus, tokenizer, monkeypatch):
    shard = interrupt(tmp_path / "train", corpus, tokenizer, monkeypatch)[1]
    raw = shard.read_bytes()
    assert build_module._read_shard(shard) is not None
    for _ in flipped(shard, 80):
        assert build_module._read_shard(shard) is None
    for damaged in (b"", raw[:3], raw[:-1], raw[: len(raw) // 2], bytes(len(raw)), raw + b"\0"):
        shard.write_bytes(damaged)
        assert build_module._read_shard(shard) is None


def test_an_unfinished_cache_of_other_data_is_rebuilt(tmp_path, corpus, tokenizer, monkeypatch):
    interrupt(tmp_path / "train", corpus, tokenizer, monkeypatch)
    (corpus / "b0.txt").write_text("changed")
    check_rebuilt(tmp_path, corpus, tokenizer)


def test_shards_of_another_size_are_not_reused(tmp_path, corpus, tokenizer, monkeypatch):
    expected = contents(build(tmp_path / "other", corpus, tokenizer).folder)
    for shard in interrupt(tmp_path / "train", corpus, tokenizer, monkeypatch)[3:]:
        shard.unlink()
    monkeypatch.setattr(build_module, "_SHARD_CHARACTERS", 500)
    assert contents(build(tmp_path / "train", corpus, tokenizer).folder) == expected


def test_a_file_that_changes_during_the_build_is_named(tmp_path, corpus, tokenizer, monkeypatch):
    original = tokenizer.encode_arrays

    def writing(texts):
        (corpus / "b2.txt").write_text("a longer text than before, written while others are read" * 20)
        return original(texts)

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode_arrays", writing)
        with pytest.raises(ConfigError, match=r"1 file changed during tokenization: b2\.txt"):
            build(tmp_path / "train", corpus, tokenizer)
    assert not (tmp_path / "train").exists()
    check_rebuilt(tmp_path, corpus, tokenizer)
