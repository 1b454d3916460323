"""Tokens without loss, sequences held out of training, and a maximum of sequences to train on."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize
from jaxlm.data.config import DataConfig
from jaxlm.data.data import Data
from jaxlm.data.sources.source_config import SourceConfig
from jaxlm.data.tokens import TokensConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.data.helpers import open_data, small_tokenizer, write_corpus

FOURS = BatchSchedule.of([BatchSize(0, 4), BatchSize(9, 8)])


@pytest.fixture
def single(tmp_path) -> TokensConfig:
    write_corpus(tmp_path / "text", 3)
    small_tokenizer(280).save(tmp_path / "tokenizer")
    places = {"cache_dir": f"{tmp_path}/cache", "tokenizer": f"{tmp_path}/tokenizer"}
    return TokensConfig(train_urls=[f"{tmp_path}/text"], **places)


@pytest.fixture
def several(single, tmp_path) -> TokensConfig:
    (tmp_path / "long.txt").write_text("all of this is another text " * 60)
    configs = {"a": SourceConfig(single.train_urls), "b": SourceConfig([f"{tmp_path}/long.txt"])}
    return dataclasses.replace(single, train_urls=[], configs=configs, train_weights={"a": 1, "b": 1})


def opened(config: DataConfig, **changes: Any) -> Data:
    config = dataclasses.replace(config, **changes)
    return open_data(config, 8)


def rows(examples) -> list[list[int]]:
    return examples.read(np.arange(len(examples)))["tokens"].tolist()


def trained_on(data: Data, name: str, num_examples: int = 4000) -> set[int]:
    """The sequences of a source that a long stream reads."""
    mixed = data.mixture(FOURS, seed=0)
    numbers, indices = mixed.find(np.arange(num_examples))
    return set(indices[numbers == mixed.names.index(name)].tolist())


def test_ignored_tokens_are_no_targets_in_training_and_validation(single):
    usual = opened(single, num_validation_sequences=3)
    ids = usual.train[""].read(np.arange(len(usual.train[""])))["targets"]
    ignored = int(np.bincount(ids.ravel()).argmax())
    found = opened(single, num_validation_sequences=3, ignore_token_id=ignored)
    pairs = [(found.train[""], usual.train[""]), (found.validation[0].examples, usual.validation[0].examples)]
    for ours, theirs in pairs:
        columns, before = (each.read(np.arange(len(each))) for each in (ours, theirs))
        expected = before["loss_mask"] * (before["targets"] != ignored)
        assert 0 < expected.sum() < before["loss_mask"].sum()
        np.testing.assert_array_equal(columns["loss_mask"], expected)
        np.testing.assert_array_equal(columns["tokens"], before["tokens"])


def test_the_last_sequences_are_held_out_of_training_and_evaluated(single, several):
    whole, data = rows(opened(single).train[""]), opened(single, num_validation_sequences=5)
    (held_out,) = data.validation
    assert rows(data.train[""]) == whole[:-5]
    assert rows(held_out.examples) == whole[-5:]
    np.testing.assert_array_equal(
        held_out.examples.target_positions(np.arange(2)),
        opened(single).train[""].target_positions(len(whole) - 5 + np.arange(2)),
    )
    assert trained_on(data, "") == set(range(len(whole) - 5))
    data = opened(several, num_validation_sequences={"b": 7})
    assert [(one.source.name, len(one.examples)) for one in data.validation] == [("b", 7)]
    assert trained_on(data, "b") == set(range(len(opened(several).train["b"]) - 7))


def test_a_source_that_is_only_held_out_is_evaluated_on(several):
    data = opened(several, train_weights={"a": 1, "b": 0}, num_validation_sequences={"b": 7})
    assert list(data.train) == ["a"]
    assert [(one.source.name, len(one.examples)) for one in data.validation] == [("b", 7)]


def test_training_repeats_the_first_batches_of_a_source(single, several):
    data = opened(several, max_train_batches={"b": 3})
    assert trained_on(data, "b") == set(range(12)), "batches of the first size"
    assert trained_on(data, "a") == set(range(len(data.train["a"])))
    assert trained_on(opened(single, max_train_batches=2, shuffle=False), "") == set(range(8))
    both = opened(single, max_train_batches=2, num_validation_sequences=5)
    assert trained_on(both, "") == set(range(8))
    assert rows(both.validation[0].examples) == rows(opened(single).train[""])[-5:]


def test_an_epoch_is_a_pass_over_what_is_trained_on(single):
    data = opened(single, max_train_batches=2, stop_strategy="first_exhausted")
    assert data.num_examples(FOURS, seed=0) == 8
    (examples,) = data.trained_on(FOURS).values()
    assert len(examples) == 8


def test_the_keys_are_part_of_the_datas_identity_only_if_they_are_set(single):
    usual = single.identity()
    for changes in ({"ignore_token_id": 3}, {"max_train_batches": 2}, {"num_validation_sequences": 5}):
        assert dataclasses.replace(single, **changes).identity() == usual | changes


REFUSED = {
    "a number of several": ("several", {"max_train_batches": 3}, "max_train_batches: 3 given, a number of each source"),
    "names of one": (
        "single",
        {"num_validation_sequences": {"a": 3}},
        "num_validation_sequences: .* such as 100 expected",
    ),
    "an unknown source": (
        "several",
        {"max_train_batches": {"c": 3}},
        "max_train_batches: no source .* 'c'. Sources: a, b",
    ),
    "too many batches": (
        "single",
        {"max_train_batches": 999},
        "max_train_batches: 999 batches of 4 .* only .* Give at most",
    ),
    "all of it": (
        "single",
        {"num_validation_sequences": 9999},
        "num_validation_sequences: 9999 given, but data has only",
    ),
    "twice": ("single", {"num_validation_sequences": 3, "validation_urls": ["{0}"]}, "has validation data of its own"),
    "an id beyond": (
        "single",
        {"ignore_token_id": 280},
        "ignore_token_id: 280 given, but the tokenizer has 280 tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_limits_that_cannot_apply_are_refused(request, case):
    which, changes, message = REFUSED[case]
    config = request.getfixturevalue(which)
    if "validation_urls" in changes:
        changes = {**changes, "validation_urls": config.train_urls}
    with pytest.raises(ConfigError, match=rf"data\.{message}" if not message.startswith("has") else message):
        opened(config, **changes).mixture(FOURS, seed=0)


def test_the_keys_are_read_from_yaml():
    section = {"max_train_batches": {"a": 3}, "num_validation_sequences": 7, "ignore_token_id": 0}
    data = decode(DataConfig, ConfigSource(section))
    assert isinstance(data, TokensConfig)
    assert (data.max_train_batches, data.num_validation_sequences, data.ignore_token_id) == ({"a": 3}, 7, 0)
    with pytest.raises(ConfigError, match="ignore_token_id"):
        decode(DataConfig, ConfigSource({"type": "pairs", "ignore_token_id": 0}))


def test_an_ignored_token_outside_the_vocabulary_is_refused_before_the_tokenizer_is_trained(tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    section = {"train_urls": [str(tmp_path / "text.txt")], "cache_dir": str(tmp_path / "cache"), "vocab_size": 300}
    decode(DataConfig, ConfigSource({**section, "ignore_token_id": 299})).check()
    with pytest.raises(ConfigError, match=r"data\.ignore_token_id: 300 given, but the tokenizer has 300 tokens"):
        decode(DataConfig, ConfigSource({**section, "ignore_token_id": 300})).check()
