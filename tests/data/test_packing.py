import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.data.cache import DamagedCacheError
from jaxlm.data.packing import Windows
from tests.data.helpers import cache_of, numbered_cache

lengths_of_documents = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def by_hand(documents: list[list[int]], seq_len: int) -> list[list[tuple]]:
    """One token at a time: (token, target, mask, segment, position) for each place of each window."""
    stream = [(token, d, i) for d, document in enumerate(documents) for i, token in enumerate(document)]
    windows = []
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
        windows.append(window)
    return windows


@settings(max_examples=150, deadline=None)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 9))
def test_agrees_with_one_token_at_a_time(lengths, seq_len):
    documents = [[1 + (7 * d + i) % 50 for i in range(length)] for d, length in enumerate(lengths)]
    windows = Windows(cache_of(documents), seq_len)
    columns = windows.read(np.arange(len(windows)))
    names = ("tokens", "targets", "loss_mask", "segment_ids", "positions")
    found = np.stack([columns[name] for name in names], axis=-1).tolist()
    assert found == [[list(place) for place in window] for window in by_hand(documents, seq_len)]


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 9))
def test_every_token_but_each_documents_first_is_a_target_once(lengths, seq_len):
    numbers = iter(range(1000))
    documents = [[next(numbers) for _ in range(length)] for length in lengths]
    windows = Windows(cache_of(documents), seq_len)
    columns = windows.read(np.arange(len(windows)))
    counted = columns["loss_mask"] == 1
    assert sorted(columns["targets"][counted].tolist()) == [t for document in documents for t in document[1:]]
    np.testing.assert_array_equal(columns["targets"][counted], columns["tokens"][counted] + 1)


def test_windows_may_be_asked_for_in_any_order():
    windows = Windows(numbered_cache(100), 8)
    everything = windows.read(np.arange(len(windows)))
    some = np.array([5, 0, 12, 5])
    for name, column in windows.read(some).items():
        np.testing.assert_array_equal(column, everything[name][some])
        assert column.dtype == (np.float32 if name == "loss_mask" else np.int32)


@pytest.mark.parametrize("seq_len", [1, 3, 8])
def test_documents_without_tokens_change_nothing(seq_len):
    full = Windows(cache_of([[1, 2, 3], [4], [5, 6]]), seq_len)
    with_empty = Windows(cache_of([[], [1, 2, 3], [], [], [4], [5, 6], []]), seq_len)
    everything = np.arange(len(full))
    assert len(with_empty) == len(full)
    for name, column in full.read(everything).items():
        np.testing.assert_array_equal(with_empty.read(everything)[name], column, err_msg=name)


def test_columns_are_apart():
    columns = Windows(numbered_cache(100), 8).read(np.arange(3))
    expected = {name: column.copy() for name, column in columns.items()}
    columns["tokens"][:] = -1
    np.testing.assert_array_equal(columns["targets"], expected["targets"])


def test_a_token_beyond_the_vocabulary_is_named():
    cache = cache_of([[1, 2, 3], [4, 500, 6]], vocab_size=300)
    with pytest.raises(DamagedCacheError, match=r"tokens\.bin: token 4 \(document 2 of some\.txt\) is 500.* has 300"):
        Windows(cache, 4).read(np.array([1]))
    np.testing.assert_array_equal(Windows(cache, 3).read(np.array([0]))["tokens"], [[1, 2, 3]])
