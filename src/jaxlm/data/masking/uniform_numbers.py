"""Uniform random numbers that depend on what they are for, and on nothing that was drawn before.

Source: SplitMix64's finalizer as a hash of a counter (Steele et al. 2014); the radical inverse of van der Corput 1935, with a
random digital shift.
"""

from collections.abc import Sequence

import numpy as np

from jaxlm.data.shuffle import mix

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FRACTION_BITS = 53  # of a float64


def hashed(words: Sequence[int | np.ndarray]) -> np.ndarray:
    """uint64 [count]: a hash of words, each a number or int64 [count]. The order of the words matters."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = mix((state ^ np.asarray(word, np.int64).astype(np.uint64)) + _GOLDEN)
    return state


def uniform_numbers(words: Sequence[int | np.ndarray], width: int) -> np.ndarray:
    """float64 [count, width]: numbers in [0, 1) for each of `count` hashes. Args: words: as in `hashed`."""
    counters = np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN
    return _as_fraction(mix(hashed(words)[:, None] + counters))


def stratified(numbers: np.ndarray, words: Sequence[int], strata: int = 1) -> np.ndarray:
    """float64 [count]: numbers in [0, 1) for consecutive integers from 0, spread evenly over each range of these.

    Of 2^k integers from a multiple of 2^k on, one is in each of 2^k equal intervals, all at the same place in their interval:
    (u + b) / B for b = 0, ..., B - 1 in some order. With S strata, this holds for S 2^k integers from a multiple of S 2^k on.

    Args:
        numbers: int64 [count].
        words: numbers that choose the shift, as in `hashed`.
        strata: the number S of consecutive integers that are in as many equal intervals.
    """
    groups, strata_of = np.divmod(np.asarray(numbers, np.int64), strata)
    reversed_bits = groups.astype(np.uint64)
    for shift, bits in enumerate(_SWAPPED):
        width = np.uint64(1 << shift)
        reversed_bits = ((reversed_bits >> width) & bits) | ((reversed_bits & bits) << width)
    return (strata_of + _as_fraction(reversed_bits ^ hashed(words))) / strata


_SWAPPED = tuple(
    np.uint64(sum(((1 << (1 << shift)) - 1) << place for place in range(0, 64, 2 << shift))) for shift in range(6)
)
"""For each power of two, the lower half of each group of twice as many bits."""


def _as_fraction(words: np.ndarray) -> np.ndarray:
    return (words >> np.uint64(64 - _FRACTION_BITS)).astype(np.float64) * 2.0**-_FRACTION_BITS
