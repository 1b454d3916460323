import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.data import shuffle
from jaxlm.data.shuffle import permute, shuffle_in_eras, shuffle_indices


def order(size: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(size), size, seed=seed, epoch=np.full(size, epoch))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 16, 17, 64, 65, 997, 1024, 1025, 4096, 65537])
def test_is_a_permutation(size):
    np.testing.assert_array_equal(np.sort(order(size, seed=3, epoch=2)), np.arange(size))


@settings(max_examples=25)
@given(size=st.integers(1, 5000), seed=st.integers(-(2**31), 2**63), epoch=st.integers(0, 2**40))
def test_is_a_permutation_for_any_size_seed_and_epoch(size, seed, epoch):
    np.testing.assert_array_equal(np.sort(order(size, seed, epoch)), np.arange(size))


@settings(max_examples=20)
@given(
    size=st.integers(2**33, 2**50), indices=st.lists(st.integers(0, 2**33 - 1), min_size=1, max_size=50, unique=True)
)
def test_sizes_larger_than_any_array(size, indices):
    places = permute(np.array(indices), size, seed=1, epoch=np.zeros(len(indices), np.int64))
    assert len(set(places.tolist())) == len(indices)
    assert places.min() >= 0
    assert places.max() < size


@settings(max_examples=20)
@given(data=st.data(), size=st.integers(1, 2000))
def test_a_single_index_gives_the_same_result_as_in_a_batch(data, size):
    index, epoch = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 5))
    alone = permute(np.array([index]), size, seed=9, epoch=np.array([epoch]))
    assert alone[0] == order(size, 9, epoch)[index]


def test_epochs_and_seeds_have_different_orders():
    orders = {tuple(order(50, seed, epoch)) for seed, epoch in itertools.product(range(20), range(20))}
    assert len(orders) == 400


@settings(max_examples=20)
@given(
    size=st.integers(1, 300),
    start=st.integers(0, 10**15),
    steps=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    block=st.integers(1, 50),
)
def test_the_endless_order_is_each_epochs_permutation(size, start, steps, block):
    examples = start + np.cumsum(steps)
    expected = [order(size, 5, int(example) // size)[int(example) % size] for example in examples]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "_BLOCK", block)
        shuffle._block.cache_clear()
        found = shuffle_indices(examples, size, seed=5)
    shuffle._block.cache_clear()
    assert found.tolist() == expected
    assert shuffle_indices(examples, size, seed=5).tolist() == expected


def epochs_of(size: int, num_epochs: int) -> np.ndarray:
    """[num_epochs, size]: one order per row."""
    epochs, indices = np.repeat(np.arange(num_epochs), size), np.tile(np.arange(size), num_epochs)
    return permute(indices, size, seed=0, epoch=epochs).reshape(num_epochs, size)


def excess(counts: np.ndarray, degrees_of_freedom: int) -> float:
    """Pearson's chi-square of counts that should be equal, in standard deviations above its mean."""
    expected = counts.sum() / counts.size
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return (chi_square - degrees_of_freedom) / np.sqrt(2 * degrees_of_freedom)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_orders_of_a_small_size_are_equally_likely(size):
    _, counts = np.unique(epochs_of(size, 20_000), axis=0, return_counts=True)
    assert len(counts) == len(list(itertools.permutations(range(size))))
    assert excess(counts, len(counts) - 1) < 5


@pytest.mark.parametrize("size", [5, 10, 30])
def test_each_index_is_equally_likely_at_each_position(size):
    orders = epochs_of(size, 20_000)
    landed = np.stack([np.bincount(orders[:, index], minlength=size) for index in range(size)])
    assert excess(landed, (size - 1) ** 2) < 5


def test_neighbors_are_separated():
    size = 10_000
    steps = np.abs(np.diff(order(size)))
    assert abs(steps.mean() / size - 1 / 3) < 0.02  # for two positions chosen independently
    assert (steps == 1).mean() < 0.002


def test_no_two_eras_of_any_epochs_have_the_same_order():
    eras = shuffle_in_eras(np.arange(4 * 256), 256, 64, seed=5).reshape(16, 64) % 64
    assert len({tuple(order) for order in eras.tolist()}) == 16


@settings(max_examples=25)
@given(size=st.integers(1, 70), era_length=st.integers(1, 80), seed=st.integers(0, 2**32))
def test_each_era_is_shuffled_separately_and_differently_in_each_epoch(size, era_length, seed):
    found = shuffle_in_eras(np.arange(3 * size), size, era_length, seed=seed).reshape(3, size)
    for epoch in found:
        for first in range(0, size, era_length):
            era = np.arange(first, min(first + era_length, size))
            np.testing.assert_array_equal(np.sort(epoch[era]), era)
    if era_length >= 40 and size >= 40:
        assert len({tuple(epoch) for epoch in found}) == 3
    somewhere = np.array([2 * size + size // 2, size // 3])
    np.testing.assert_array_equal(shuffle_in_eras(somewhere, size, era_length, seed=seed), found.ravel()[somewhere])
