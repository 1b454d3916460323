"""Data from a class of another package (tests/plugins/acme_lm/corpus.py)."""

import importlib
from pathlib import Path

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.config import DataConfig
from jaxlm.data.sources.source_config import CorpusConfig
from jaxlm.reading.decode import decode, encode
from jaxlm.reading.yaml import ConfigSource

PLACE = "corpus:Sums"


@pytest.fixture
def made(tmp_path, monkeypatch):
    # Imports only this module and unregisters it afterwards: other tests list all registered classes.
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "plugins" / "acme_lm")
    CorpusConfig.get_known_choices()  # imports jaxlm's own first
    monkeypatch.setattr(CorpusConfig, "_choice_registry", {})

    def make(source=None, **keys) -> DataConfig:
        own = {"type": PLACE, "num_records": 50} | (source or {})
        return decode(DataConfig, ConfigSource({"source": own, "cache_dir": str(tmp_path), "vocab_size": 270, **keys}))

    return make


def texts(config: DataConfig, split: str) -> list[str]:
    [source] = config.corpus.sources
    return list(source.documents(split))


def test_records_are_used_like_those_of_a_file(made, tmp_path):
    config = made()
    config.check()
    assert list(tmp_path.iterdir()) == []  # nothing is written before it is needed
    sums = importlib.import_module("corpus").Sums(50)
    data = config.open(config.corpus.load_tokenizer(lambda _: None), 16, lambda _: None)
    tokenizer = config.corpus.load_tokenizer(lambda _: None)
    for split, windows in (("train", data.train[""]), ("validation", data.validation[0].examples)):
        expected = [record["text"] for record in sums.records(split)]
        assert texts(config, split) == expected
        cache = windows.cache
        found = [tokenizer.decode(cache.tokens[a:b].tolist()) for a, b in zip(cache.offsets, cache.offsets[1:])]  # noqa: B905
        assert found == expected
    assert cache.source_of(0) == "document 1 of validation.jsonl"
    assert decode(DataConfig, ConfigSource(encode(config))) == config


def test_another_version_or_key_writes_new_records_and_refuses_the_old_cache(made, monkeypatch):
    config = made()
    config.open(config.corpus.load_tokenizer(lambda _: None), 16, lambda _: None)
    before = config.identity()
    assert made().identity() == before
    module = importlib.import_module("corpus")
    monkeypatch.setattr(module.Sums, "records", lambda self, split: iter([{"text": "1 + 1 = 2"}] * 9))
    assert made().identity() == before  # the version is unchanged
    monkeypatch.setattr(module.Sums, "version", "2")
    assert made().identity() != before
    with pytest.raises(ConfigError, match=r"was built from other inputs:\s+files changed: 1 \(train\.jsonl\)"):
        made().open(config.corpus.load_tokenizer(lambda _: None), 16, lambda _: None)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train_urls": ["a.txt"]}, "train_urls: .* given together with source: {type: corpus:Sums}, and a source"),
        ({"id": "some/data"}, r"id: some/data given together with source: "),
        ({"source": {"num_recrods": 3}}, r"source\.num_recrods: no such key .*Did you mean 'num_records'"),
        ({"source": {"type": "corpus:Products"}}, r"there is nothing of that name in corpus"),
    ],
)
def test_invalid_sections_are_refused(made, keys, message):
    with pytest.raises(ConfigError, match=message):
        made(**keys).check()


def test_a_record_that_is_not_json_is_an_error(made, monkeypatch):
    config = made()
    module = importlib.import_module("corpus")
    monkeypatch.setattr(module.Sums, "records", lambda self, split: iter([{"text": "good"}, {"text": {1, 2}}]))
    with pytest.raises(
        ConfigError, match=r"data\.source: record 2 of train is .*expected a mapping of keys to JSON values"
    ):
        texts(config, "train")
