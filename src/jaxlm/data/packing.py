"""Documents packed into windows of equal length, none of their tokens lost.

tokens    B a a a E|B b b E B|c c ...        windows of 5, and one token more for the last target
targets   a a a E .|b b E . c|c ...          every token but a document's first is a target once
segments  1 1 1 1 1|1 1 1 1 2|1 ...
"""

import numpy as np

from jaxlm.data.cache import TokenCache


class Windows:
    """The windows of a token cache."""

    def __init__(self, cache: TokenCache, seq_len: int):
        self.cache = cache
        self.seq_len = seq_len

    def __len__(self) -> int:
        # The last token is nobody's input: nothing follows it.
        return max(1, -(-(self.cache.num_tokens - 1) // self.seq_len))

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """int64: the token of the cache that each window begins with."""
        return indices * self.seq_len

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of `TokenBatch` for some windows, [len(indices), seq_len] each.

        Raises:
            DamagedCacheError: a token id that the vocabulary does not have.
        """
        starts = self.starts(indices)
        columns = np.arange(self.seq_len + 1, dtype=np.int32)
        inside = columns < (self.cache.num_tokens - starts)[:, None]
        begins = self._begins(starts)
        ids = self.cache.read(starts, self.seq_len + 1)
        here, follows = slice(None, -1), slice(1, None)
        first = np.maximum.accumulate(np.where(begins[:, here], columns[here], 0), axis=1)
        return {
            "tokens": ids[:, here].copy(),
            "targets": ids[:, follows].copy(),
            "loss_mask": (inside[:, follows] & ~begins[:, follows]).astype(np.float32),
            "segment_ids": begins[:, here].cumsum(axis=1, dtype=np.int32) * inside[:, here],
            "positions": (columns[here] - first) * inside[:, here],
        }

    def _begins(self, starts: np.ndarray) -> np.ndarray:
        """bool [len(starts), seq_len + 1]: whether a document, or the window itself, begins at this place."""
        offsets = self.cache.offsets
        # Two look-ups a window instead of one a token: only the documents that begin in it are touched.
        first, beyond = np.searchsorted(offsets, [starts, starts + self.seq_len + 1])
        counts = beyond - first
        rows = np.repeat(np.arange(len(starts)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.zeros((len(starts), self.seq_len + 1), bool)
        begins[rows, offsets[first[rows] + within] - starts[rows]] = True
        begins[:, 0] = True
        return begins
