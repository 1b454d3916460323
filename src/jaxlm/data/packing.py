"""Documents in windows of equal length: cut wherever those end, none of their tokens lost, or whole.

tokens    B a a a E|B b b E B|c c ...        windows of 5, and one token more for the last target
targets   a a a E .|b b E . c|c ...          every token but a document's first is a target once
segments  1 1 1 1 1|1 1 1 1 2|1 ...

Whole ones follow each other as long as they fit, in their order, which needs no search: `B a a E .|B b b b E|B c E B d E|`.
What of a document is beyond its window's end is lost, and counted.
"""

from dataclasses import dataclass

import numpy as np

from jaxlm.data.cache.token_cache import TokenCache


@dataclass(frozen=True)
class PackedDocuments:
    """Windows of documents that are not cut in two, and what that costs.

    Attributes:
        starts: int64 [windows], the first token of each.
        ends: int64 [windows], the token behind the last one of each: beyond the window, for a document that is too long.
        num_truncated: documents that are longer than a window and the target behind it.
        num_lost: their tokens that are in no window.
        num_without_targets: windows left out because no token within reach is asked for.
    """

    starts: np.ndarray
    ends: np.ndarray
    num_truncated: int
    num_lost: int
    num_without_targets: int


def pack_documents(cache: TokenCache, seq_len: int, *, most: int) -> PackedDocuments:
    """Args: most: documents in a window; 0 means as many as fit."""
    lengths = np.diff(cache.offsets)
    places = np.concatenate([[0], np.cumsum(np.minimum(lengths, seq_len))])
    firsts = [0]
    while firsts[-1] < len(lengths):
        fitting = int(np.searchsorted(places, places[firsts[-1]] + seq_len, side="right")) - 1
        firsts.append(firsts[-1] + 1 if most == 1 else max(fitting, firsts[-1] + 1))
    bounds = cache.offsets[np.array(firsts, np.int64)]
    starts, ends = bounds[:-1], bounds[1:]
    asked = cache.read_targets(np.zeros(1, np.int64), cache.num_tokens)[0]
    asked[cache.offsets[:-1][lengths > 0]] = False  # the first token of a document is nobody's target
    before = np.concatenate([[0], np.cumsum(asked)])
    some = before[np.minimum(ends, starts + seq_len + 1)] > before[starts]
    lost = np.maximum(lengths - (seq_len + 1), 0)
    return PackedDocuments(starts[some], ends[some], int((lost > 0).sum()), int(lost.sum()), int((~some).sum()))


def describe_packing(windows: "PackedSequences") -> str:
    """What packing came to, for people."""
    whole = windows.whole
    assert whole is not None
    parts = [f"{len(windows):,} windows of {windows.seq_len:,} tokens, {windows.padding:.1%} of it padding"]
    if whole.num_truncated:
        parts.append(
            f"{whole.num_truncated:,} documents are longer, and lose"
            f" {whole.num_lost:,} of {windows.cache.num_tokens:,} tokens"
        )
    if whole.num_without_targets:
        parts.append(f"{whole.num_without_targets:,} windows left out: what is asked for is beyond their end")
    return "; ".join(parts)


class PackedSequences:
    """The windows of a token cache."""

    def __init__(self, cache: TokenCache, seq_len: int, whole: PackedDocuments | None = None):
        """Args: whole: where its documents are not to be cut in two."""
        self.cache = cache
        self.seq_len = seq_len
        self.whole = whole

    def __len__(self) -> int:
        if self.whole is not None:
            return len(self.whole.starts)
        # The last token is nobody's input: nothing follows it.
        return max(1, -(-(self.cache.num_tokens - 1) // self.seq_len))

    @property
    def padding(self) -> float:
        """The part of all places that holds no input."""
        places = len(self) * self.seq_len
        if self.whole is None:
            return (places - (self.cache.num_tokens - 1)) / places
        return 1 - float(np.minimum(self.whole.ends - self.whole.starts, self.seq_len).sum()) / places

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """int64: the token of the cache that each window begins with."""
        return indices * self.seq_len if self.whole is None else self.whole.starts[indices]

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of `TokenBatch` for some windows, [len(indices), seq_len] each.

        Raises:
            DamagedCacheError: a token id that the vocabulary does not have.
        """
        starts = self.starts(indices)
        ends = np.full_like(starts, self.cache.num_tokens) if self.whole is None else self.whole.ends[indices]
        columns = np.arange(self.seq_len + 1, dtype=np.int32)
        inside = columns < (ends - starts)[:, None]
        begins = self._begins(starts)
        ids = self.cache.read(starts, self.seq_len + 1)
        asked = inside & ~begins
        if self.whole is not None:
            ids *= inside
        if self.cache.targets is not None:
            asked &= self.cache.read_targets(starts, self.seq_len + 1)
        here, follows = slice(None, -1), slice(1, None)
        first = np.maximum.accumulate(np.where(begins[:, here], columns[here], 0), axis=1)
        return {
            "tokens": ids[:, here].copy(),
            "targets": ids[:, follows].copy(),
            "loss_mask": asked[:, follows].astype(np.float32),
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
