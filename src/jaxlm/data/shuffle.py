"""Stateless shuffling: the position of example i in an epoch's permutation, without materializing the permutation.

A Feistel network is a bijection on 2k-bit numbers for any round function. Numbers outside 0..n go through the network again
until they fall inside ("cycle walking"; Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains).
"""

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxlm.core.field_types import PositiveInt

_BLOCK = 4096  # examples permuted in one call: numpy's cost per call is far above its cost per element
_ROUNDS = 10  # with 6, permutations of very small sets are measurably non-uniform over many epochs
_WORD = 1 << 64


def shuffle_indices(examples: np.ndarray, size: int, *, seed: int) -> np.ndarray:
    """int64: the index in 0..size of each example in an endless stream of epochs, each a permutation of its own.

    Args:
        examples: int64 [count], example numbers from 0; fastest if they are close to each other.
    """
    first, last = int(examples.min()) // _BLOCK, int(examples.max()) // _BLOCK
    places = np.concatenate([_block(number, size, seed) for number in range(first, last + 1)])
    return places[examples - first * _BLOCK]


def shuffle_in_eras(examples: np.ndarray, size: int, era_length: int, *, seed: int) -> np.ndarray:
    """Like `shuffle_indices`, but within blocks of `era_length` indices (the last may be shorter) that stay in order."""
    epoch, index = np.divmod(examples, size)
    era, offset = np.divmod(index, era_length)
    places = np.empty_like(examples)
    last = size // era_length
    for length, selected in ((era_length, era < last), (size - last * era_length, era == last)):
        if selected.any():
            # Each era of each epoch gets its own permutation.
            number = epoch[selected] * (last + 1) + era[selected]
            places[selected] = era[selected] * era_length + permute(offset[selected], length, seed=seed, epoch=number)
    return places


@functools.lru_cache(maxsize=256)  # 8 MB; each source of a mixture has blocks of its own
def _block(number: int, size: int, seed: int) -> np.ndarray:
    epoch, index = np.divmod(np.arange(number * _BLOCK, (number + 1) * _BLOCK), size)
    return permute(index, size, seed=seed, epoch=epoch)


def permute(indices: np.ndarray, size: int, *, seed: int, epoch: np.ndarray) -> np.ndarray:
    """int64: `indices` mapped through the permutation of 0..size selected by `seed` and `epoch`.

    Args:
        indices: int64, 0 <= index < size.
        epoch: int64, same shape: the permutation to use for each index.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    keys = mix(epoch.astype(np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % _WORD))
    values = _feistel(indices.astype(np.uint64), keys, half)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], keys[outside], half)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, half: np.uint64) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (mix(right + keys + np.uint64(number * 0xD1B54A32D192ED03 % _WORD)) & mask)
    return (left << half) | right


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele et al. 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class EraShuffle:
    """Shuffles sequences within consecutive blocks (eras) of equal length; the eras stay in the order of the data.

    Attributes:
        type: must be `era`.
        era_length: sequences per era.
    """

    era_length: PositiveInt
    type: Literal["era"] = "era"


Shuffle = bool | EraShuffle
