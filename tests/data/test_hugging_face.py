"""Datasets written by the library `datasets`, read with and without it."""

import json
import shutil
import sys

import pyarrow as pa
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.data.sources.files import sources_of
from jaxlm.data.tokens import TokensConfig
from tests.data.helpers import find_files, some_text

TEXTS = [some_text(seed, 20) for seed in range(50)]


def texts(*urls, **options):
    return [
        text
        for file in find_files([str(u) for u in urls], "data.train_urls", "text", **options)
        for text in file.documents()
    ]


@pytest.fixture(scope="module")
def datasets():
    return pytest.importorskip("datasets")


@pytest.fixture
def dataset(datasets):
    return datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})


def test_a_saved_dataset(tmp_path, dataset):
    dataset.save_to_disk(tmp_path / "saved", num_shards=3)
    assert texts(tmp_path / "saved") == TEXTS
    [first, *_] = find_files([str(tmp_path / "saved")], "x", "text")
    assert first.name == "data-00000-of-00003.arrow"


def test_selected_rows_of_a_saved_dataset(tmp_path, dataset):
    dataset.filter(lambda row: row["id"] % 2 == 1).shuffle(seed=1).save_to_disk(tmp_path / "saved")
    assert sorted(texts(tmp_path / "saved")) == sorted(TEXTS[1::2])


def test_a_saved_dataset_among_other_files(tmp_path, dataset):
    dataset.save_to_disk(tmp_path / "corpus" / "saved")
    (tmp_path / "corpus" / "a.txt").write_text("a")
    assert texts(tmp_path / "corpus") == ["a", *TEXTS]


def test_splits(tmp_path, dataset, datasets):
    halves = datasets.DatasetDict({"train": dataset.select(range(40)), "test": dataset.select(range(40, 50))})
    halves.save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved" / "train") == TEXTS[:40]
    assert texts(tmp_path / "saved" / "test") == TEXTS[40:]
    with pytest.raises(ConfigError, match=r"several splits\. Choose one: .*saved/test or /train"):
        texts(tmp_path / "saved")


def test_an_incomplete_saved_dataset_is_an_error(tmp_path):
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    with pytest.raises(ConfigError, match=r"is incomplete: data-00000-of-00001\.arrow missing"):
        texts(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"state\.json does not list the dataset's files"):
        texts(tmp_path)


class TestHub:
    """Without the hub: a stand-in replaces `load_dataset`."""

    URL = "hf:some/data?name=main&split=train"

    @pytest.fixture
    def asked(self, monkeypatch, dataset, datasets):
        asked: list[tuple[str, dict[str, str]]] = []

        def answer(id, **options):
            asked.append((id, options))
            return dataset

        monkeypatch.setattr(datasets, "load_dataset", answer)
        monkeypatch.setattr(datasets, "load_dataset_builder", answer)
        return asked

    def test_is_copied_once(self, asked, tmp_path):
        [source] = sources_of(self.URL, "x", tmp_path, None)
        assert asked == [("some/data", {"name": "main"})]
        assert source.num_bytes is None
        assert list(tmp_path.iterdir()) == []
        assert texts(self.URL, mirror=tmp_path) == TEXTS
        assert asked[-1] == ("some/data", {"name": "main", "split": "train"})
        asked.clear()
        assert texts(self.URL, mirror=tmp_path) == TEXTS
        assert asked == []

    def test_a_hub_dataset_trains(self, asked, tmp_path):
        config = TokensConfig(train_urls=[self.URL], cache_dir=str(tmp_path / "cache"), vocab_size=300)
        config.check()
        assert not (tmp_path / "cache").exists()
        cache = config.open(config.corpus.load_tokenizer(lambda _: None), 16, lambda _: None).train[""].cache
        assert len(cache.offsets) == len(TEXTS) + 1
        assert cache.source_of(0) == f"document 1 of {self.URL}/data-00000-of-00001.arrow"

    def test_no_such_dataset(self, monkeypatch, datasets, tmp_path):
        def missing(id, **options):
            raise FileNotFoundError(f"Dataset '{id}' doesn't exist on the Hub")

        monkeypatch.setattr(datasets, "load_dataset_builder", missing)
        with pytest.raises(ConfigError, match=r"data\.train_urls\[0\]: 'hf:some/data.*cannot be loaded.*doesn't exist"):
            texts(self.URL, mirror=tmp_path)


class TestKeys:
    """`id`, `name`, `split`, `validation_split` and `stream` of a source."""

    @pytest.fixture
    def saved(self, tmp_path, dataset, datasets):
        parts = {"train": dataset.select(range(40)), "test": dataset.select(range(40, 50))}
        datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
        return str(tmp_path / "saved")

    @pytest.fixture
    def texts_of(self, tmp_path):
        def texts_of(**keys) -> dict[str, list[str]]:
            config = TokensConfig(cache_dir=str(tmp_path / "cache"), vocab_size=300, **keys)
            check_fields(config, "data")
            config.check()
            [source] = config.corpus.sources
            return {split: list(source.documents(split)) for split in ("train", "validation") if source.has(split)}

        return texts_of

    def test_a_folder_of_splits(self, saved, texts_of):
        assert texts_of(id=saved, validation_split="test") == {"train": TEXTS[:40], "validation": TEXTS[40:]}
        assert texts_of(id=saved, split="test", validation_split=None) == {"train": TEXTS[40:]}
        assert texts_of(id=f"{saved}/train", validation_split=None) == {"train": TEXTS[:40]}
        other = texts_of(id=saved, validation_urls=[f"{saved}/test"])
        assert other == {"train": TEXTS[:40], "validation": TEXTS[40:]}

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({}, r"data\.validation_split: 'validation', but .*\. Choose one of: test, train, or null"),
            ({"validation_split": "tset"}, r"data\.validation_split: 'tset', but .* has no such split"),
            ({"split": "tarin"}, r"data\.split: 'tarin', but .*Choose one of: test, train"),
            ({"name": "main"}, r"data\.name: has no effect on .*saved"),
            ({"train_urls": ["x.txt"]}, r"data\.train_urls: .* given together with id: "),
            ({"id": None, "split": "test"}, r"data\.split: test given without id"),
            ({"id": None, "stream": True}, r"data\.stream: true given without id"),
        ],
    )
    def test_invalid_sections_are_refused(self, saved, texts_of, keys, message):
        with pytest.raises(ConfigError, match=message):
            texts_of(**{"id": saved, "train_urls": [] if keys.get("id", 1) else ["x.txt"], **keys})

    def test_streamed_rows_equal_loaded_rows(self, tmp_path, texts_of, monkeypatch, datasets):
        """A folder of files is read by the same library as the hub, without a network."""
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
        (tmp_path / "repo").mkdir()
        rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
        for split in ("train", "validation"):
            (tmp_path / "repo" / f"{split}.jsonl").write_text(rows)
        id = str(tmp_path / "repo")
        loaded = texts_of(id=id)
        assert (tmp_path / "library").exists()
        assert loaded == {"train": TEXTS, "validation": TEXTS}
        shutil.rmtree(tmp_path / "cache")
        shutil.rmtree(tmp_path / "library")
        assert texts_of(id=id, stream=True) == loaded
        assert not list((tmp_path / "library").rglob("*.arrow"))

    def test_no_network(self, texts_of, monkeypatch, datasets):
        """Levanter ends with a traceback from the hub's client."""

        def unreachable(id, **options):
            raise ConnectionError(f"Couldn't reach '{id}' on the Hub")

        monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
        with pytest.raises(
            ConfigError, match=r"data\.id: 'hf:some/data\?split=train' cannot be loaded: Conn"
        ) as caught:
            texts_of(id="some/data")
        assert "datasets.load_dataset('some/data').save_to_disk('FOLDER')" in str(caught.value)
        assert "and set data.id to its path" in str(caught.value)


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"'hf:some/data' needs the library datasets.*Run: pip install .*'datasets>="):
        texts("hf:some/data", mirror=tmp_path)


@pytest.mark.parametrize("url", ["hf:", "hf:a/b?spilt=train", "hf:?name=x", "hf:a/b?main"])
def test_spellings(url):
    with pytest.raises(
        ConfigError, match=r"expected 'hf:ID', optionally followed by '\?' and any of name, split, revision"
    ):
        texts(url)


def test_the_layout_is_read_without_the_library(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]})
    )
    for name, part in (("b", TEXTS[:30]), ("a", TEXTS[30:])):
        content = pa.table({"text": part})
        with pa.ipc.new_stream(str(tmp_path / f"{name}.arrow"), content.schema) as writer:
            writer.write_table(content)
    assert sorted(texts(tmp_path)) == sorted(TEXTS)
