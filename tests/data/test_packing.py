import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.data.best_fit import BestFitConfig, BestFitSequences, pack_best_fit
from jaxlm.data.cache.artifacts import DamagedError
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.examples import Examples
from jaxlm.data.packing import PackedSequences, pack_documents
from tests.data.helpers import cache_of, numbered_cache

lengths_of_documents = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def by_hand(documents: list[list[int]], seq_len: int) -> list[list[tuple]]:
    """One token at a time: (token, target, mask, segment, position) for each position of each sequence."""
    stream = [(token, d, i) for d, document in enumerate(documents) for i, token in enumerate(document)]
    sequences = []
    for start in range(0, max(1, len(stream) - 1), seq_len):
        window = []
        for place in range(start, start + seq_len):
            if place >= len(stream):
                window.append((0, 0, 0.0, 0, 0))
                continue
            token, document, inside = stream[place]
            following = stream[place + 1] if place + 1 < len(stream) else (0, -1, 0)
            first_of_window = stream[start]
            segment = document - first_of_window[1] + 1
            position = place - start if segment == 1 else inside
            window.append((token, following[0], float(following[1] == document), segment, position))
        sequences.append(window)
    return sequences


@settings(max_examples=60)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 9))
def test_agrees_with_packing_one_token_at_a_time(lengths, seq_len):
    documents = [[1 + (7 * d + i) % 50 for i in range(length)] for d, length in enumerate(lengths)]
    sequences = PackedSequences(cache_of(documents), seq_len)
    columns = sequences.read(np.arange(len(sequences)))
    names = ("tokens", "targets", "loss_mask", "segment_ids", "positions")
    found = np.stack([columns[name] for name in names], axis=-1).tolist()
    assert found == [[list(place) for place in window] for window in by_hand(documents, seq_len)]


def rows_of(kind: str, cache: TokenCache, seq_len: int, **options: Any) -> Examples:
    """Documents that are split, whole ones, or rows that are packed by best fit."""
    if kind == "best fit":
        config = BestFitConfig(fill="split", buffer_size=2, refill_size=1)
        return BestFitSequences(cache, seq_len, config, pack_best_fit(cache.offsets, seq_len + 1, config), **options)
    whole = pack_documents(cache, seq_len, max_documents=0) if kind == "whole" else None
    return PackedSequences(cache, seq_len, whole, **options)


every_kind = pytest.mark.parametrize("kind", ["split", "whole", "best fit"])


@every_kind
def test_sequences_can_be_read_in_any_order_and_do_not_share_memory(kind):
    sequences = rows_of(kind, numbered_cache(100), 8)
    everything = sequences.read(np.arange(len(sequences)))
    some = np.array([5, 0, 12, 5])
    columns = sequences.read(some)
    for name, column in columns.items():
        np.testing.assert_array_equal(column, everything[name][some])
        assert column.dtype == (np.float32 if name == "loss_mask" else np.int32)
    for name, column in columns.items():
        column[:] = -1  # padding rows are zeroed in place
        for other in columns.keys() - {name}:
            np.testing.assert_array_equal(columns[other], everything[other][some])
        column[:] = everything[name][some]


@every_kind
@pytest.mark.parametrize("seq_len", [1, 3, 8])
def test_empty_documents_have_no_effect(kind, seq_len):
    full = rows_of(kind, cache_of([[1, 2, 3], [4], [5, 6]]), seq_len)
    with_empty = rows_of(kind, cache_of([[], [1, 2, 3], [], [], [4], [5, 6], []]), seq_len)
    everything = np.arange(len(full))
    assert len(with_empty) == len(full)
    for name, column in full.read(everything).items():
        np.testing.assert_array_equal(with_empty.read(everything)[name], column, err_msg=name)


@every_kind
def test_an_ignored_token_is_an_input_but_not_a_target(kind):
    usual, ignoring = (rows_of(kind, numbered_cache(60), 7, ignored_id=ignored) for ignored in (None, 12))
    before, after = (sequences.read(np.arange(len(usual))) for sequences in (usual, ignoring))
    np.testing.assert_array_equal(after["loss_mask"], before["loss_mask"] * (before["targets"] != 12))
    assert after["loss_mask"].sum() == before["loss_mask"].sum() - 1
    np.testing.assert_array_equal(after["tokens"], before["tokens"])


@every_kind
def test_a_token_beyond_the_vocabulary_is_named(kind):
    sequences = rows_of(kind, cache_of([[1, 2, 3], [1, 500, 6]], vocab_size=300), 3)
    with pytest.raises(DamagedError, match=r"tokens\.bin: token 4 \(document 2 of some\.txt\) is 500.* has 300"):
        sequences.read(np.arange(len(sequences)))
    np.testing.assert_array_equal(PackedSequences(sequences.cache, 3).read(np.array([0]))["tokens"], [[1, 2, 3]])


def packed_by_hand(documents: list[list[int]], masks: list[list[int]], seq_len: int, most: int) -> list[list[tuple]]:
    """One document at a time into the last sequence, if it fits: (token, target, mask, segment, position)."""
    sequences: list[list[int]] = []
    room = 0
    for number, document in enumerate(documents):
        needed = min(len(document), seq_len)
        if not sequences or needed > room or most == 1:
            sequences.append([])
            room = seq_len
        sequences[-1].append(number)
        room -= needed
    rows = []
    for members in sequences:
        row = []
        for segment, number in enumerate(members, start=1):
            ids, asked = documents[number], masks[number]
            for place in range(min(len(ids), seq_len)):
                follows = place + 1 < len(ids)
                row.append(
                    (ids[place], ids[place + 1] if follows else 0, float(follows and asked[place + 1]), segment, place)
                )
        if any(mask for _, _, mask, _, _ in row):
            rows.append(row + [(0, 0, 0.0, 0, 0)] * (seq_len - len(row)))
    return rows


@pytest.mark.slow
@settings(max_examples=80)
@given(
    lengths=lengths_of_documents,
    seq_len=st.integers(1, 9),
    max_documents=st.sampled_from([0, 1]),
    truncation=st.sampled_from(["keep_start", "keep_end"]),
    data=st.data(),
)
def test_whole_documents_agree_with_packing_one_document_at_a_time(lengths, seq_len, max_documents, truncation, data):
    documents = [[1 + (7 * d + i) % 50 for i in range(length)] for d, length in enumerate(lengths)]
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in lengths]
    cache = dataclasses.replace(cache_of(documents), target_mask=np.concatenate(masks).astype(np.uint8))
    whole = pack_documents(cache, seq_len, max_documents=max_documents, truncation=truncation)
    if truncation == "keep_end":
        documents, masks = ([each[-seq_len - 1 :] for each in several] for several in (documents, masks))
    sequences, expected = (
        PackedSequences(cache, seq_len, whole),
        packed_by_hand(documents, masks, seq_len, max_documents),
    )
    assert len(sequences) == len(expected)
    assert whole.num_overlong == sum(n > seq_len + 1 for n in lengths)
    assert whole.num_dropped_tokens == sum(max(0, n - seq_len - 1) for n in lengths)
    if expected:
        columns = sequences.read(np.arange(len(sequences)))
        found = np.stack([columns[n] for n in ("tokens", "loss_mask", "segment_ids", "positions")], axis=-1).tolist()
        assert found == [[[t, m, s, p] for t, _, m, s, p in row] for row in expected]
        asked = columns["loss_mask"] > 0
        np.testing.assert_array_equal(
            columns["targets"][asked], np.array([[r[1] for r in row] for row in expected])[asked]
        )
        assert sequences.padding == pytest.approx(np.mean([[s == 0 for _, _, _, s, _ in row] for row in expected]))
