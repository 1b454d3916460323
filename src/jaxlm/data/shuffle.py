"""Shuffling as a function: where example i of an epoch is found, without ever making the whole order.

A Feistel network is a bijection on 2k-bit numbers whatever its round function; numbers that fall outside of 0..n are
sent through again until they do not ("cycle walking"; Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains).
"""

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxlm.core.errors import ConfigError

_BLOCK = 4096  # examples whose places are found together: numpy's cost a call is far above that of one number
_ROUNDS = 10  # with 6, where an index of a very small set lands is measurably uneven over many epochs
_WORD = 1 << 64


def shuffle_indices(examples: np.ndarray, size: int, *, seed: int) -> np.ndarray:
    """int64: the places of `examples` in an endless order, epoch after epoch, each a permutation of 0..size.

    Args:
        examples: int64 [count], near to each other; from 0 on.
    """
    first, last = int(examples.min()) // _BLOCK, int(examples.max()) // _BLOCK
    places = np.concatenate([_block(number, size, seed) for number in range(first, last + 1)])
    return places[examples - first * _BLOCK]


def shuffle_in_eras(examples: np.ndarray, size: int, era_length: int, *, seed: int) -> np.ndarray:
    """As `shuffle_indices`, but each stretch of `era_length` places (the last one may be shorter) stays where it is."""
    epoch, index = np.divmod(examples, size)
    era, within = np.divmod(index, era_length)
    places = np.empty_like(examples)
    last = size // era_length
    for lengths, mine in ((era_length, era < last), (size - last * era_length, era == last)):
        if mine.any():
            # Every era of every epoch has a permutation of its own.
            number = epoch[mine] * (last + 1) + era[mine]
            places[mine] = era[mine] * era_length + permute(within[mine], lengths, seed=seed, epoch=number)
    return places


@functools.lru_cache(maxsize=256)  # 8 MB: each source of a mixture has its own
def _block(number: int, size: int, seed: int) -> np.ndarray:
    epoch, index = np.divmod(np.arange(number * _BLOCK, (number + 1) * _BLOCK), size)
    return permute(index, size, seed=seed, epoch=epoch)


def permute(indices: np.ndarray, size: int, *, seed: int, epoch: np.ndarray) -> np.ndarray:
    """int64: the places of `indices` in a permutation of 0..size that `seed` and `epoch` choose.

    Args:
        indices: int64, each from 0 to size, exclusive.
        epoch: int64, of the same shape: one permutation each.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    keys = _mixed(epoch.astype(np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % _WORD))
    values = _feistel(indices.astype(np.uint64), keys, half)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], keys[outside], half)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, half: np.uint64) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (_mixed(right + keys + np.uint64(number * 0xD1B54A32D192ED03 % _WORD)) & mask)
    return (left << half) | right


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele et al. 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class EraShuffle:
    """Windows shuffled within stretches of equal length, which follow each other as the data stands.

    Attributes:
        type: `era`.
        era_length: windows in a stretch.
    """

    era_length: int
    type: Literal["era"] = "era"

    def __post_init__(self):
        if self.era_length < 1:
            raise ConfigError(f"data.shuffle.era_length: {self.era_length} given, 1 or more windows expected")


Shuffle = bool | EraShuffle
