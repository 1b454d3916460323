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

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of `TokenBatch` for some windows, [len(indices), seq_len] each.

        Raises:
            DamagedCacheError: a token id that the vocabulary does not have.
        """
        cache = self.cache
        places = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        inside = places < cache.num_tokens
        ids = cache.read(np.minimum(places, cache.num_tokens - 1))
        documents = np.searchsorted(cache.offsets, places, side="right")
        here, follows = slice(None, -1), slice(1, None)
        same = (documents[:, here] == documents[:, follows]) & inside[:, follows]
        first = np.maximum(cache.offsets[documents[:, here] - 1], places[:, :1])
        padding = ~inside[:, here]
        return {
            "tokens": np.where(padding, 0, ids[:, here]),
            "targets": np.where(inside[:, follows], ids[:, follows], 0),
            "loss_mask": same.astype(np.float32),
            "segment_ids": np.where(padding, 0, documents[:, here] - documents[:, :1] + 1).astype(np.int32),
            "positions": np.where(padding, 0, places[:, here] - first).astype(np.int32),
        }
