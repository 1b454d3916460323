import dataclasses
import json

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.config import DataConfig
from jaxlm.data.formats.completions import SupervisedFormat
from jaxlm.data.sources import mirror
from jaxlm.data.tokenizer import train_bpe as train_bpe_module
from jaxlm.data.tokens import TokensConfig
from tests.data.helpers import small_tokenizer, some_text, write_corpus


def silent(line: str) -> None:
    del line


@pytest.fixture
def config(tmp_path):
    write_corpus(tmp_path / "text")
    (tmp_path / "other.txt").write_text(some_text(500))
    return TokensConfig(
        train_urls=[str(tmp_path / "text")],
        validation_urls=[str(tmp_path / "other.txt")],
        cache_dir=str(tmp_path / "cache"),
        vocab_size=300,
    )


def changed(config: DataConfig, **fields: object) -> DataConfig:
    return dataclasses.replace(config, **fields)


def test_opens_the_configured_data(config):
    logged: list[str] = []
    config.check()
    tokenizer = config.corpus.load_tokenizer(logged.append)
    data = config.open(tokenizer, 16, logged.append)
    assert tokenizer.vocab_size == 300
    assert [line.split(" ")[0] for line in logged] == ["training", "train:", "validation:"]
    (validation,) = [one.examples for one in data.validation]
    text = "".join(config.corpus.validation_documents())
    assert validation.cache.num_bytes == len(text.encode())
    ids = validation.cache.tokens[1:-1]
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


def test_a_second_start_builds_nothing(config, monkeypatch):
    logged: list[str] = []
    first = config.open(config.corpus.load_tokenizer(silent), 16, silent)
    monkeypatch.setattr(train_bpe_module, "train_bpe", None)
    config.check()
    second = config.open(config.corpus.load_tokenizer(logged.append), 16, logged.append)
    assert logged == []
    assert second.train[""].cache.fingerprint == first.train[""].cache.fingerprint


def test_checking_writes_nothing(config, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    config.check()
    config.identity()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train_urls": []}, r"data\.train_urls: empty\. Give files"),
        ({"validation_urls": ["nowhere.txt"]}, r"data\.validation_urls\[0\]: 'nowhere\.txt' matches no file"),
        ({"vocab_size": 256}, r"data\.vocab_size: 256 given, at least 257 expected"),
        ({"tokenizer": "nowhere"}, r"data\.tokenizer: 'nowhere': no tokenizer\.json found"),
    ],
)
def test_invalid_sections_are_refused(config, fields, message):
    with pytest.raises(ConfigError, match=message):
        changed(config, **fields).check()


def test_validation_text_without_anything_to_measure_is_named_with_its_key(config, tmp_path):
    paths = {"train": tmp_path / "train.jsonl", "validation": tmp_path / "validation.jsonl"}
    for path, question in zip(paths.values(), ("short", "much too long " * 20), strict=True):
        path.write_text(json.dumps({"input": question, "output": "answer"}) + "\n")
    urls = {f"{split}_urls": [str(path)] for split, path in paths.items()}
    record_format = SupervisedFormat(input_field="input", output_field="output")
    config = changed(config, **urls, format=record_format)
    with pytest.raises(
        ConfigError, match=r"model\.seq_len \(64\)\. .*Set data\.validation_urls to other text, or raise"
    ):
        config.open(config.corpus.load_tokenizer(silent), 64, silent)


def test_a_text_key_needs_a_file_of_records(config):
    changed(config, text_key="body").check()  # one of the files is .jsonl
    [other] = config.validation_urls
    with pytest.raises(ConfigError, match=r"data\.text_key: 'body' given, but no file is \.jsonl"):
        changed(config, text_key="body", train_urls=[other]).check()


class TestGivenTokenizer:
    @pytest.fixture
    def folder(self, tmp_path):
        small_tokenizer(310).save(tmp_path / "given")
        return tmp_path / "given"

    def test_vocab_size_must_agree(self, config, folder):
        assert changed(config, tokenizer=str(folder), vocab_size=310).corpus.load_tokenizer(silent).vocab_size == 310
        assert changed(config, tokenizer=str(folder), vocab_size=None).corpus.load_tokenizer(silent).vocab_size == 310
        with pytest.raises(ConfigError, match=r"data\.vocab_size: 300 given, but the tokenizer .* has 310 tokens"):
            changed(config, tokenizer=str(folder)).check()

    @pytest.mark.parametrize("side", ["bos", "eos"])
    def test_enforced_tokens_must_exist(self, config, folder, side):
        names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", f"{side}_token": None}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        config = changed(config, tokenizer=str(folder), vocab_size=None)
        with pytest.raises(ConfigError, match=rf"data\.enforce_{side}: true, but the tokenizer has no {side.upper()}"):
            config.check()
        changed(config, **{f"enforce_{side}": False}).check()


class TestTrainedTokenizer:
    def test_a_tokenizer_of_other_text_is_refused(self, config, tmp_path):
        config.corpus.load_tokenizer(silent)
        with pytest.raises(
            ConfigError, match=r"(?s)tokenizer .*built from other inputs.*vocab_size: was 300, is now 301"
        ):
            changed(config, vocab_size=301).corpus.load_tokenizer(silent)
        (tmp_path / "text" / "b3.txt").write_text("changed")
        with pytest.raises(ConfigError, match=r"files changed: 1 \(b3\.txt\)"):
            config.corpus.load_tokenizer(silent)

    def test_one_of_an_earlier_version_is_read(self, config, tmp_path):
        """Its key is all that was stored about it."""
        trained = config.corpus.load_tokenizer(silent)
        about = tmp_path / "cache" / "tokenizer" / "made_from.json"
        about.write_text(json.dumps(json.loads(about.read_text())["made_from"]))
        assert config.corpus.load_tokenizer(silent).fingerprint == trained.fingerprint
        with pytest.raises(ConfigError, match="vocab_size: was 300, is now 301"):
            changed(config, vocab_size=301).corpus.load_tokenizer(silent)

    def test_a_vocabulary_smaller_than_requested_is_logged(self, config):
        logged: list[str] = []
        tokenizer = changed(config, vocab_size=100_000).corpus.load_tokenizer(logged.append)
        assert tokenizer.vocab_size < 100_000
        assert f"yields only {tokenizer.vocab_size:,} tokens" in logged[-1]

    def test_default_size(self, config):
        logged: list[str] = []
        changed(config, vocab_size=None).corpus.load_tokenizer(logged.append)
        assert logged[0].startswith("training a BPE tokenizer of 8,192 tokens")


def test_a_cache_of_other_text_is_refused_before_anything_is_built(config, tmp_path):
    config.open(config.corpus.load_tokenizer(silent), 16, silent)
    with pytest.raises(ConfigError, match="enforce_eos: was True, is now False"):
        changed(config, enforce_eos=False).check()
    (tmp_path / "other.txt").write_text("changed")
    with pytest.raises(ConfigError, match=r"(?s)cache/validation was built.*files changed: 1 \(other\.txt\)"):
        config.check()


class TestIdentity:
    def test_depends_only_on_the_content(self, config, tmp_path):
        before = config.identity()
        assert json.loads(json.dumps(before)) == before
        moved = (tmp_path / "text").rename(tmp_path / "moved")
        assert changed(config, train_urls=[str(moved)], cache_dir="elsewhere", validation_urls=[]).identity() == before
        (moved / "b0.txt").write_text("changed")
        assert changed(config, train_urls=[str(moved)]).identity() != before

    @pytest.mark.parametrize(
        "fields",
        [{"vocab_size": 301}, {"text_key": "x"}, {"shuffle": False}, {"enforce_bos": False}, {"enforce_eos": False}],
    )
    def test_depends_on_every_field_that_changes_tokens(self, config, fields):
        assert changed(config, **fields).identity() != config.identity()

    def test_depends_on_the_tokenizer(self, config, tmp_path):
        for size in (300, 310):
            small_tokenizer(size).save(tmp_path / str(size))
        found = [changed(config, tokenizer=str(tmp_path / name)).identity()["tokenizer"] for name in ("300", "310")]
        assert len({str(identity) for identity in [*found, config.identity()["tokenizer"]]}) == 3


class TestCacheAmongTheText:
    """A cache_dir inside a folder of text: the cache's .json files are not text."""

    def built(self, cache, *urls):
        config = TokensConfig(train_urls=[str(url) for url in urls], cache_dir=str(cache), vocab_size=270)
        config.check()
        tokenizer = config.corpus.load_tokenizer(lambda _: None)
        return list(config.open(tokenizer, 16, lambda _: None).train[""].cache.documents_of)

    @pytest.mark.parametrize(
        "url", ["{}", "file://{}", "{}/**/*", "file://{}/**/*.json*", "{{{}/**/*.jsonl,{}/*.jsonl}}"]
    )
    def test_cache_files_are_ignored(self, tmp_path, url):
        texts = write_corpus(tmp_path)
        (tmp_path / "deep").mkdir()
        (tmp_path / "a.jsonl").rename(tmp_path / "deep" / "a.jsonl")
        (tmp_path / "b.jsonl").write_text(json.dumps({"text": texts[0] * 9}))
        first = self.built(tmp_path / "cache", url.format(tmp_path, tmp_path))
        assert {"b.jsonl", "deep/a.jsonl"} <= set(first)
        mirror.list_remote.cache_clear()  # simulates a new process, which finds the cache
        assert self.built(tmp_path / "cache", url.format(tmp_path, tmp_path)) == first

    @pytest.mark.parametrize("url", ["{}", "{}/**/*.txt", "file://{}"])
    def test_a_cache_folder_equal_to_the_text_folder_is_refused(self, tmp_path, url):
        write_corpus(tmp_path)
        with pytest.raises(ConfigError, match=r"is the folder data\.cache_dir.*of its own"):
            self.built(tmp_path, url.format(tmp_path))

    def test_named_text_files_in_the_cache_folder_are_read(self, tmp_path):
        write_corpus(tmp_path / "text")
        write_corpus(tmp_path, 2)
        assert "b1.txt" in self.built(tmp_path, tmp_path / "text")
        assert self.built(tmp_path / "other", tmp_path / "*.txt") == ["b0.txt", "b1.txt"]

    def test_a_folder_with_only_the_cache_has_no_text(self, tmp_path):
        write_corpus(tmp_path / "cache")
        with pytest.raises(ConfigError, match=r"contains no files outside data\.cache_dir"):
            self.built(tmp_path / "cache", tmp_path)
