"""How many entries of a lookup table each token gets.

Source: Tseng and De Sa 2026, Large Lookup Layers (arXiv:2601.21461), algorithm 1, for `lzw`; karpathy/nanochat
(`nanochat/l3.py`, commit b7629ef) for `nanochat`.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

Allocation = Literal["lzw", "nanochat", "uniform"]


def allocate(
    allocation: Allocation, sequences: Sequence[np.ndarray], vocab_size: int, num_entries: int, max_entries: int
) -> np.ndarray:
    """The number of entries of each token, int64 [vocab_size]: at least 1, at most `max_entries`, `num_entries` in all.

    Args:
        sequences: token ids. Codewords do not cross from one sequence to the next.
        num_entries: from `vocab_size` to `vocab_size * max_entries`.
    """
    assert vocab_size <= num_entries <= vocab_size * max_entries, (vocab_size, num_entries, max_entries)
    if allocation == "uniform":
        return np.diff(uniform_bounds(vocab_size, num_entries))
    if allocation == "nanochat":
        return _by_frequency(sequences, vocab_size, num_entries)
    return _along(codeword_ends(sequences, vocab_size), vocab_size, num_entries, max_entries)


def uniform_bounds(vocab_size: int, num_entries: int) -> np.ndarray:
    """Where the entries of each token begin if all tokens get the same number, give or take one: int64 [vocab_size + 1]."""
    return np.arange(vocab_size + 1) * num_entries // vocab_size


def _by_frequency(sequences: Sequence[np.ndarray], vocab_size: int, num_entries: int) -> np.ndarray:
    """Entries in rounds, the most frequent tokens first: the same number for all tokens, give or take one."""
    counts = np.zeros(vocab_size, np.int64)
    for sequence in sequences:
        # Every token counts once, and once more as the second of a pair.
        counts += np.bincount(sequence, minlength=vocab_size) + np.bincount(sequence[1:], minlength=vocab_size)
    per_token, rest = divmod(num_entries, vocab_size)
    entries = np.full(vocab_size, per_token)
    entries[np.argsort(-counts, kind="stable")[:rest]] += 1
    return entries


def _along(ends: np.ndarray, vocab_size: int, num_entries: int, max_entries: int) -> np.ndarray:
    """One entry for each token, then one for the last token of each codeword, the most frequent codewords first.

    A sample too small for the table has too few codewords. Then they are gone through again, as often as it takes.
    """
    entries = np.ones(vocab_size, np.int64)
    order = np.argsort(ends, kind="stable")
    first = np.searchsorted(ends[order], np.arange(vocab_size))
    occurrence = np.empty(len(ends), np.int64)  # how many codewords before end with the same token
    occurrence[order] = np.arange(len(ends)) - first[ends[order]]
    while left := num_entries - int(entries.sum()):
        allowed = ends[occurrence < (max_entries - entries)[ends]]
        entries += np.bincount(allowed[:left], minlength=vocab_size)
    return entries


def codeword_ends(sequences: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """The last token of each codeword of an LZW scan, the most frequent codewords first: int64 [codewords].

    All single tokens are codewords, so every token is there. Again and again, the scan reads the longest codeword that comes
    next, counts it, and makes a codeword of it and the token that follows. As in the paper, a codeword at the end of a
    sequence is counted anew, from 1.
    """
    counts, ends = [0] * vocab_size, list(range(vocab_size))
    children: dict[int, int] = {}  # number of a codeword * vocab_size + next token -> number of the longer codeword
    for sequence in sequences:
        tokens = sequence.tolist()
        length, start = len(tokens), 0
        while start + 1 < length:
            number, stop = tokens[start], start + 1
            edge = number * vocab_size + tokens[stop]
            longer = children.get(edge)
            while longer is not None and stop + 1 < length:
                number, stop = longer, stop + 1
                edge = number * vocab_size + tokens[stop]
                longer = children.get(edge)
            counts[number] += 1
            if longer is None:
                children[edge] = len(counts)
                counts.append(1)
                ends.append(tokens[stop])
            else:
                counts[longer] = 1
            start = stop + 1
    return np.asarray(ends)[np.argsort(-np.asarray(counts), kind="stable")]
