"""Datasets that the library `datasets` has written, read with and without it."""

import json
import sys

import pyarrow as pa
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.config import DataConfig
from jaxlm.data.sources import find_files, list_sources
from tests.data.helpers import some_text

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


def test_rows_that_were_chosen_before_saving(tmp_path, dataset):
    dataset.filter(lambda row: row["id"] % 2 == 1).shuffle(seed=1).save_to_disk(tmp_path / "saved")
    assert sorted(texts(tmp_path / "saved")) == sorted(TEXTS[1::2])


def test_one_among_other_files(tmp_path, dataset):
    dataset.save_to_disk(tmp_path / "corpus" / "saved")
    (tmp_path / "corpus" / "a.txt").write_text("a")
    assert texts(tmp_path / "corpus") == ["a", *TEXTS]


def test_splits(tmp_path, dataset, datasets):
    halves = datasets.DatasetDict({"train": dataset.select(range(40)), "test": dataset.select(range(40, 50))})
    halves.save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved" / "train") == TEXTS[:40]
    assert texts(tmp_path / "saved" / "test") == TEXTS[40:]
    with pytest.raises(ConfigError, match=r"several splits\. Name one: .*saved/test or /train"):
        texts(tmp_path / "saved")


def test_a_saved_dataset_that_is_not_whole(tmp_path):
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    with pytest.raises(ConfigError, match=r"is not whole: data-00000-of-00001\.arrow is missing"):
        texts(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"state\.json does not name the dataset's files"):
        texts(tmp_path)


class TestHub:
    """The hub is the one thing that is not there: `load_dataset` answers in its place."""

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
        [[source]] = list_sources([self.URL], "x", tmp_path)
        assert asked == [("some/data", {"name": "main"})]
        assert source.num_bytes is None
        assert list(tmp_path.iterdir()) == []
        assert texts(self.URL, mirror=tmp_path) == TEXTS
        assert asked[-1] == ("some/data", {"name": "main", "split": "train"})
        asked.clear()
        assert texts(self.URL, mirror=tmp_path) == TEXTS
        assert asked == []

    def test_trains(self, asked, tmp_path):
        config = DataConfig(train_urls=[self.URL], cache_dir=str(tmp_path / "cache"), vocab_size=300)
        config.check()
        assert not (tmp_path / "cache").exists()
        cache = config.open(config.load_tokenizer(lambda _: None), 16, lambda _: None).train[""].cache
        assert len(cache.offsets) == len(TEXTS) + 1
        assert cache.source_of(0) == f"document 1 of {self.URL}/data-00000-of-00001.arrow"

    def test_no_such_dataset(self, monkeypatch, datasets, tmp_path):
        def missing(id, **options):
            raise FileNotFoundError(f"Dataset '{id}' doesn't exist on the Hub")

        monkeypatch.setattr(datasets, "load_dataset_builder", missing)
        with pytest.raises(ConfigError, match=r"data\.train_urls\[0\]: 'hf:some/data.*cannot be loaded.*doesn't exist"):
            texts(self.URL, mirror=tmp_path)


def test_the_library_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"'hf:some/data' needs the library datasets.*pip install 'jaxlm\[hf\]'"):
        texts("hf:some/data", mirror=tmp_path)


@pytest.mark.parametrize("url", ["hf:", "hf:a/b?spilt=train", "hf:?name=x", "hf:a/b?main"])
def test_spellings(url):
    with pytest.raises(ConfigError, match=r"'hf:ID' expected, and after a '\?' any of name, split, revision"):
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
