"""Overlapping sequences: `data.stride`."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.data.best_fit import BestFitConfig
from jaxlm.data.examples import Examples, split_off
from jaxlm.data.formats.completions import SupervisedFormat
from jaxlm.data.packing import PackedSequences, Windows
from jaxlm.data.tokens import TokensConfig
from tests.data.helpers import cache_of, numbered_cache, small_tokenizer

sizes = st.tuples(st.integers(2, 60), st.integers(2, 9), st.integers(1, 9)).map(lambda s: (s[0], s[1], min(s[1:])))


@settings(max_examples=50)
@given(sizes=sizes)
def test_each_sequence_begins_a_stride_after_the_one_before(sizes):
    num_tokens, seq_len, stride = sizes
    cache = cache_of([list(range(num_tokens))])
    sequences = PackedSequences(cache, seq_len, windows=Windows(stride, True))
    columns = sequences.read(np.arange(len(sequences)))
    # As many as it takes to have every token but the first as a target, and no more.
    starts = [0]
    while starts[-1] + seq_len < num_tokens - 1:
        starts.append(starts[-1] + stride)
    assert len(sequences) == len(starts)
    for row, start in enumerate(starts):
        inside = [token for token in range(start, start + seq_len) if token < num_tokens - 1]
        mask = columns["loss_mask"][row] == 1
        assert columns["tokens"][row][mask].tolist() == inside
        assert columns["targets"][row][mask].tolist() == [token + 1 for token in inside]
        assert columns["positions"][row][mask].tolist() == list(range(len(inside)))
    num_inputs = sum(min(seq_len, num_tokens - 1 - start) for start in starts)
    assert sequences.padding == pytest.approx(1 - num_inputs / (seq_len * len(starts)))
    np.testing.assert_array_equal(sequences.target_positions(np.arange(len(starts)))[:, 0], np.array(starts) + 1)


@settings(max_examples=50)
@given(sizes=sizes, length=st.integers(1, 12))
def test_without_the_overlap_every_token_is_a_target_once(sizes, length):
    num_tokens, seq_len, stride = sizes
    cache = numbered_cache(num_tokens, length)
    columns = {overlap: PackedSequences(cache, seq_len, windows=Windows(stride, overlap)) for overlap in (True, False)}
    every, once = (sequences.read(np.arange(len(sequences))) for sequences in columns.values())
    counted = once["loss_mask"] == 1
    whole = PackedSequences(cache, seq_len)
    usual = whole.read(np.arange(len(whole)))
    assert sorted(once["targets"][counted]) == sorted(usual["targets"][usual["loss_mask"] == 1])
    # All but those of the first sequence come after at least seq_len - stride tokens of their row.
    assert (np.nonzero(counted[1:])[1] >= seq_len - stride).all()
    for name in ("tokens", "targets", "segment_ids", "positions"):
        np.testing.assert_array_equal(every[name], once[name])
    if stride == seq_len:
        for name, column in usual.items():
            np.testing.assert_array_equal(once[name], column)


@pytest.mark.slow
@settings(max_examples=50)
@given(sizes=sizes, held_out=st.integers(1, 20), overlap=st.booleans())
def test_no_token_that_is_evaluated_is_trained_on(sizes, held_out, overlap):
    num_tokens, seq_len, stride = sizes
    sequences = PackedSequences(cache_of([list(range(num_tokens))]), seq_len, windows=Windows(stride, overlap))
    left = len(sequences) - held_out
    evaluated = {token for row in range(max(left, 0), len(sequences)) for token in targets(sequences, row)}
    apart = [row for row in range(left) if not evaluated & targets(sequences, row)]
    if not apart:
        with pytest.raises(ConfigError, match=rf"num_validation_sequences: {held_out} given, but data has only"):
            split_off(sequences, held_out, "data")
        return
    train, validation = split_off(sequences, held_out, "data")
    assert len(train) == len(apart), "no more is left out than has to be"
    assert set().union(*(targets(train, row) for row in range(len(train)))).isdisjoint(evaluated)
    assert set().union(*(targets(validation, row) for row in range(held_out))) == evaluated


def targets(sequences: Examples, row: int) -> set[int]:
    columns = sequences.read(np.array([row]))
    return set(columns["targets"][columns["loss_mask"] == 1].tolist())


def test_a_stride_is_part_of_the_datas_identity_and_is_refused_where_it_has_no_effect(tmp_path):
    small_tokenizer(300).save(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("some words " * 50)
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    plain = TokensConfig(
        train_urls=[f"{tmp_path}/a.txt"], cache_dir=f"{tmp_path}/cache", tokenizer=f"{tmp_path}/tokenizer"
    )
    tokenizer = plain.corpus.load_tokenizer(lambda _: None)

    def opened(**changes):
        config = dataclasses.replace(plain, **changes)
        check_fields(config, "data")
        config.check()
        return config, config.open(tokenizer, 16, lambda _: None).train[""]

    config, sequences = opened(stride=4)
    usual = opened()[1]
    assert len(sequences) == 1 + -(-(usual.cache.num_tokens - 17) // 4) > 3 * len(usual)
    identities = [dataclasses.replace(config, **c).identity() for c in ({}, {"stride": 8}, {"train_overlap": False})]
    assert len({str(identity) for identity in [*identities, plain.identity()]}) == 4
    records = {"train_urls": [f"{tmp_path}/b.jsonl"], "format": SupervisedFormat(), "stride": 4}
    other = dataclasses.replace(plain, cache_dir=f"{tmp_path}/other", stride=17)
    with pytest.raises(ConfigError, match=r"data\.stride: 17 given, but model\.seq_len is 16"):
        other.open(tokenizer, 16, lambda _: None)
    assert not (tmp_path / "other").exists(), "nothing has been tokenized"
    for changes, message in (
        ({"train_overlap": False}, r"data\.train_overlap: false given without stride"),
        ({"stride": 4, "packing": BestFitConfig()}, r"data\.stride: 4 given together with packing, whose rows do not"),
        (records, r"data\.stride: 4 given, but the records of data\.format \(supervised\) are not split"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(**changes)
