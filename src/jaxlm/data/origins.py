"""Which URL each token of a cache is from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxlm.data.cache import TokenCache


@dataclass(frozen=True)
class Origins:
    """URLs, and the stretches of a cache that they fill one after another.

    Attributes:
        urls: in the order of the configuration.
        ends: int64 [urls], the place of the first token behind each.
    """

    urls: tuple[str, ...]
    ends: np.ndarray

    def of(self, places: np.ndarray) -> np.ndarray:
        """int32, the number of the URL that each token is from; the last one's beyond the end."""
        numbers = np.searchsorted(self.ends, places, side="right")
        return np.minimum(numbers, len(self.urls) - 1).astype(np.int32)


def make_origins(cache: TokenCache, urls: Sequence[str], files_until: Sequence[int]) -> Origins:
    """Args: files_until: how many of the cache's files come from each URL and those before it."""
    documents = np.concatenate([[0], np.cumsum(list(cache.documents_of.values()))]).astype(np.int64)
    return Origins(tuple(urls), cache.offsets[documents[np.asarray(files_until)]])
