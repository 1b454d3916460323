"""Mixtures against a stream built example by example, and the valid values of `train_weights`."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize
from jaxlm.data.config import DataConfig
from jaxlm.data.mixture import Mixture, MixtureStage, block_counts, weight_stages
from jaxlm.data.packing import PackedSequences
from jaxlm.data.shuffle import EraShuffle
from jaxlm.data.sources.named import SourceConfig
from jaxlm.data.tokens import TokensConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.data.helpers import cache_of, open_data, small_tokenizer, write_corpus

SEQ_LEN = 4
SHARED = Path(__file__).parents[3] / "shared" / "data"
BLOCK = 8


def source(number: int, num_sequences: int) -> PackedSequences:
    """Sequence w of source n holds the tokens n * 1000 + w."""
    tokens = [number * 1000 + place // SEQ_LEN for place in range(num_sequences * SEQ_LEN + 1)]
    return PackedSequences(cache_of([tokens]), SEQ_LEN)


SOURCES = {"a": source(1, 11), "b": source(2, 30), "c": source(3, 5)}
STAGES = [MixtureStage(0, (4, 3, 1)), MixtureStage(19, (1, 6, 1)), MixtureStage(45, (1, 3, 4))]


def mixture(stages=STAGES, sources=SOURCES, seed: int = 0, shuffle: bool = True) -> Mixture:
    return Mixture(sources, stages, seed=seed, shuffle=shuffle)


def stream(mixed: Mixture, number: int) -> list[tuple[str, int]]:
    sources, places = mixed.find(np.arange(number))
    return [(mixed.names[s], int(p)) for s, p in zip(sources, places, strict=True)]


def test_each_block_has_the_exact_number_of_examples_per_source():
    drawn = [name for name, _ in stream(mixture(), 45 + 4 * BLOCK)]
    starts = [stage.start for stage in STAGES] + [45 + 4 * BLOCK]
    for stage, start, end in zip(STAGES, starts, starts[1:], strict=False):
        for first in range(start, end - BLOCK + 1, BLOCK):
            counted = Counter(drawn[first : first + BLOCK])
            assert tuple(counted[name] for name in SOURCES) == stage.counts
    assert drawn[:8] != drawn[8:16]


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_sequence_is_skipped_or_repeated_for_any_stages(shuffle):
    """In Levanter, a stage that begins inside a block is an error (100 steps of 32 in blocks of 2048)."""
    drawn = stream(mixture(shuffle=shuffle), 400)
    for name, windows in SOURCES.items():
        own, size = [place for drawn_name, place in drawn if drawn_name == name], len(windows)
        epochs = [own[first : first + size] for first in range(0, len(own) - size + 1, size)]
        assert len(epochs) > 1
        for epoch in epochs:
            assert sorted(epoch) == list(range(size))
        assert (epochs[0] != epochs[1]) == shuffle


def test_an_example_is_found_without_reading_earlier_ones():
    drawn = stream(mixture(), 300)
    fresh = mixture()
    for examples in (np.array([299, 3, 44, 45, 46, 18, 19]), np.arange(17, 52), np.array([0])):
        sources, places = fresh.find(examples)
        assert [(fresh.names[s], p) for s, p in zip(sources, places, strict=True)] == [drawn[i] for i in examples]


def test_examples_equal_the_sources_sequences():
    mixed, examples = mixture(), np.array([5, 60, 44, 7, 100])
    columns = mixed.read(examples)
    for row, (number, place) in enumerate(zip(*mixed.find(examples), strict=True)):
        for name, expected in mixed.examples_of(number).read(np.array([place])).items():
            np.testing.assert_array_equal(columns[name][row], expected[0], err_msg=name)
            assert columns[name].dtype == expected.dtype


def test_drawn_sequences_are_those_of_the_examples(monkeypatch):
    monkeypatch.setattr("jaxlm.data.mixture._CHUNK", 7)
    everything = stream(mixture(), 300)
    for first, end in ((0, 0), (0, 5), (3, 40), (11, 300)):
        drawn = mixture().drawn(first, end)
        assert {(name, place) for name in drawn for place in drawn[name].tolist()} == set(everything[first:end])
        assert all((np.diff(places) > 0).all() for places in drawn.values())


def test_adding_a_source_keeps_the_order_of_the_others():
    def own(mixed: Mixture) -> list[int]:
        return [place for name, place in stream(mixed, 200) if name == "a"][:30]

    alone = mixture([MixtureStage(0, (2,))], {"a": SOURCES["a"]})
    assert own(alone) == own(mixture())
    assert own(mixture(seed=1)) != own(mixture())


def test_exhausted_after_counts_the_examples():
    mixed = mixture()
    drawn = stream(mixed, 400)
    for name, windows, end in zip(SOURCES, SOURCES.values(), mixed.exhausted_after(), strict=True):
        places = [i for i, (drawn_name, _) in enumerate(drawn) if drawn_name == name]
        assert end == (places[len(windows) - 1] + 1 if len(places) >= len(windows) else None), name
    assert mixture([MixtureStage(0, (4, 4, 0))]).exhausted_after()[2] is None


weights = st.lists(st.floats(0.01, 1), min_size=1, max_size=6)


@settings(max_examples=60)
@given(weights, st.integers(1000, 5000))
def test_counts_match_the_weights_within_one_example(values, block_size):
    names = [str(n) for n in range(len(values))]
    counts = block_counts(dict(zip(names, values, strict=True)), names, block_size)
    assert sum(counts) == block_size
    np.testing.assert_array_less(np.abs(np.array(counts) - np.array(values) / sum(values) * block_size), 1)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(st.integers(1, 60), max_size=4), st.integers(0, 2**32), st.data())
def test_stages_at_any_step_agree_with_an_example_by_example_stream(lengths, seed, data):
    counts = st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any)
    starts = np.cumsum([0, *lengths])
    stages = [MixtureStage(int(start), tuple(data.draw(counts))) for start in starts]
    mixed = mixture(stages, seed=seed)
    seen = dict.fromkeys(SOURCES, 0)
    fresh = mixture([MixtureStage(0, (99, 99, 99))], seed=seed)
    orders = {name: [p for n, p in stream(fresh, 900) if n == name] for name in SOURCES}
    for name, place in stream(mixed, int(starts[-1]) + 20):
        assert place == orders[name][seen[name]]
        seen[name] += 1


@pytest.mark.parametrize(
    ("given_weights", "message"),
    [
        ({"a": 1, "z": 1}, "no source with train_urls is named 'z'\. Sources: a, b"),
        ({"a": 1}, "no weight for b"),
        ({"a": -1, "b": 1}, "-1 given for 'a'"),
        ({"a": 0, "b": 0}, "no source has a weight above 0"),
        ([[5, {"a": 1, "b": 1}]], r"steps \[5\]"),
        ([[0, {"a": 1, "b": 1}], [0, {"a": 1, "b": 2}]], r"steps \[0, 0\]"),
        ([[0.5, {"a": 1}]], "0.5 given as the first step"),
        ([[0]], "expected a pair"),
        ([], "the first must start at 0"),
    ],
)
def test_invalid_weights_are_refused(given_weights, message):
    with pytest.raises(ConfigError, match=message):
        weight_stages(given_weights, ["a", "b"])


def test_a_weight_below_one_example_per_block_is_an_error():
    with pytest.raises(ConfigError, match=r"Raise data\.mixture_block_size to 1001"):
        block_counts({"a": 999, "b": 1}, ["a", "b"], 100)


@pytest.fixture
def config(tmp_path):
    write_corpus(tmp_path / "text", 3)
    (tmp_path / "long.txt").write_text("all of this is another text " * 60)
    configs = {
        "a": SourceConfig([f"{tmp_path}/text"], [f"{tmp_path}/text/b0.txt"], tags=["x"]),
        "b": SourceConfig([f"{tmp_path}/long.txt"]),
    }
    small_tokenizer(280).save(tmp_path / "tokenizer")
    places = {"cache_dir": f"{tmp_path}/cache", "tokenizer": f"{tmp_path}/tokenizer"}
    return TokensConfig(**places, configs=configs, train_weights={"a": 3, "b": 1})


def opened(config: DataConfig):
    return open_data(config, 8)


@pytest.mark.slow
def test_mixture_fields(config, tmp_path):
    """Each field changes what is read, or for how long (see tests/test_fields.py)."""

    def seen(**changes) -> list:
        data = opened(dataclasses.replace(config, **changes))
        mixed = data.mixture(BatchSchedule.of([BatchSize(0, 4)]), seed=0)
        tags = [one.source.config.tags for one in data.validation]
        return [stream(mixed, 5000), data.num_examples(BatchSchedule.of([BatchSize(0, 4)]), seed=0), tags]

    other = {**config.configs, "c": SourceConfig([f"{tmp_path}/long.txt"])}
    usual = seen()
    assert usual == seen()
    assert Counter(name for name, _ in usual[0][:4096]) == {"a": 3072, "b": 1024}
    assert usual[1:] == [None, [["x"]]]
    for changes in (
        {"configs": other, "train_weights": {"a": 1, "b": 1, "c": 1}},
        {"train_weights": [[0, {"a": 3, "b": 1}], [10, {"a": 1, "b": 3}]]},
        {"train_weights": None},
        {"stop_strategy": "first_exhausted"},
        {"stop_strategy": "all_exhausted"},
        {"mixture_block_size": 16},
        {"configs": {**config.configs, "a": dataclasses.replace(config.configs["a"], tags=["y"])}},
        {"shuffle": False},
        {"shuffle": EraShuffle(10)},
        {"shuffle": EraShuffle(3)},
    ):
        assert seen(**changes) != usual, changes
    first = seen(stop_strategy="first_exhausted")
    assert first[1] < seen(stop_strategy="all_exhausted")[1]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["a", "b", "c"]


def test_a_source_that_no_stage_uses_needs_no_cache(config):
    data = opened(dataclasses.replace(config, train_weights={"a": 1, "b": 0}))
    assert list(data.train) == ["a"]
    never = dataclasses.replace(config, train_weights=[[0, {"a": 1, "b": 1}], [1, {"a": 1, "b": 0}]])
    never = dataclasses.replace(never, stop_strategy="all_exhausted")
    with pytest.raises(ConfigError, match="b would never be exhausted"):
        opened(never).num_examples(BatchSchedule.of([BatchSize(0, 1)]), seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_urls": ["x.txt"]},
            "data.train_urls: .* given together with configs: .*, where each source has its own",
        ),
        ({"tags": ["x"]}, "data.tags: .* given together with configs"),
        ({"configs": {}, "train_urls": ["x.txt"]}, "data.train_weights: .* given without configs"),
        ({"configs": {name: SourceConfig(["x"], cache_dir="c") for name in "ab"}}, "share the cache_dir c"),
        ({"mixture_block_size": 1}, "less than one example in a block of 1"),
        ({"configs": {"mirror": SourceConfig(["x"])}}, "'mirror' is not a valid source name"),
        ({"configs": {"a/b": SourceConfig(["x"])}}, "'a/b' is not a valid source name"),
        ({"configs": {"a": SourceConfig()}, "train_weights": None}, "data.configs.a: a source without text"),
        ({"configs": {"a": SourceConfig(["nowhere.txt"])}, "train_weights": None}, r"data.configs.a.train_urls\[0\]"),
    ],
)
def test_invalid_mixture_sections_are_refused(config, changes, message):
    changed = dataclasses.replace(config, **changes)
    with pytest.raises(ConfigError, match=message):  # noqa: PT012
        check_fields(changed, "data")
        changed.check()


def test_the_identity_depends_on_the_sources_content(config):
    def identity(**changes) -> dict:
        return dataclasses.replace(config, **changes).identity()

    usual = identity()
    assert usual == identity(train_weights={"a": 1, "b": 9}, cache_dir="elsewhere")
    assert usual != identity(configs={"a": config.configs["a"]}, train_weights=None)
    assert usual != identity(configs={**config.configs, "b": config.configs["a"]})


def test_values_of_shuffle():
    def read(text: str) -> object:
        return decode(DataConfig, ConfigSource({"shuffle": yaml.safe_load(text)})).shuffle

    assert [read("true"), read("false")] == [True, False]
    assert read("{type: era, era_length: 100}") == EraShuffle(100)
    for text, message in {
        "{type: era}": "era_length",
        "{type: epoch, era_length: 1}": "'era' expected",
        "era": "'era' given",
    }.items():
        with pytest.raises(ConfigError, match=message):
            read(text)
    with pytest.raises(ConfigError, match="era_length: 0 given"):
        read("{type: era, era_length: 0}")


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared data")
def test_real_texts_follow_the_weights_of_each_stage(tmp_path):
    names = {"plays": "tinyshakespeare.txt", "wiki": "wikitext2_valid.txt"}
    config = TokensConfig(
        configs={name: SourceConfig([str(SHARED / file)]) for name, file in names.items()},
        cache_dir=str(tmp_path),
        tokenizer=str(SHARED / "gpt2_tokenizer"),
        train_weights=[[0, {"plays": 3, "wiki": 1}], [5, {"plays": 1, "wiki": 3}]],
        mixture_block_size=16,
    )
    config.check()
    tokenizer = config.corpus.load_tokenizer(print)
    mixed = config.open(tokenizer, 128, print).mixture(BatchSchedule.of([BatchSize(0, 16)]), seed=0)
    plays = (SHARED / names["plays"]).read_text()
    for step in range(10):
        rows = mixed.read(step * 16 + np.arange(16))["tokens"]
        texts = [tokenizer.decode(row[8:-8].tolist()).strip("\ufffd") for row in rows]
        assert sum(text in plays for text in texts) == (12 if step < 5 else 4)
