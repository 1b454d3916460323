"""Packs documents into sequences of equal length, either split at sequence boundaries (no token is lost) or kept whole.

tokens    B a a a E|B b b E B|c c ...        sequences of 5 tokens, plus one token for the last target
targets   a a a E .|b b E . c|c ...          every token except a document's first is a target exactly once
segments  1 1 1 1 1|1 1 1 1 2|1 ...

With a stride, sequences overlap: each begins `stride` tokens after the one before it.

Whole documents are packed greedily in order, as many as fit: `B a a E .|B b b b E|B c E B d E|`. A document longer than a
sequence is truncated at the end or at the beginning, or left out, and the lost tokens are counted.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxlm.data.base import given
from jaxlm.data.batch import Columns, shifted_columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.examples import ContiguousExamples, documents_as_text
from jaxlm.data.formats.base import TRUNCATION_TEXT, Truncation


@dataclass(frozen=True)
class PackedDocuments:
    """Sequences of whole documents, and what packing them so costs.

    Attributes:
        starts: int64 [sequences], first token of each sequence.
        ends: int64 [sequences], end (exclusive) of each sequence's documents; past the sequence if a document that is too
            long keeps its beginning.
        num_overlong: documents longer than seq_len + 1 tokens (the last one is only a target).
        num_dropped_tokens: tokens of these documents that are in no sequence.
        num_without_targets: sequences left out because they contain no target token.
        truncation: what became of the documents that are too long.
    """

    starts: np.ndarray
    ends: np.ndarray
    num_overlong: int
    num_dropped_tokens: int
    num_without_targets: int
    truncation: Truncation = "keep_start"


def pack_documents(
    cache: TokenCache, seq_len: int, *, max_documents: int, truncation: Truncation = "keep_start"
) -> PackedDocuments:
    """Args:
    max_documents: maximum documents per sequence: 1, or 0 for as many as fit.
    truncation: what becomes of documents that are longer than a sequence.
    """
    lengths = np.diff(cache.offsets)
    cumulative = np.concatenate([[0], np.cumsum(np.minimum(lengths, seq_len))])
    firsts = [0]
    while firsts[-1] < len(lengths):
        fitting = int(np.searchsorted(cumulative, cumulative[firsts[-1]] + seq_len, side="right")) - 1
        firsts.append(firsts[-1] + 1 if max_documents == 1 else max(fitting, firsts[-1] + 1))
    bounds = cache.offsets[np.array(firsts, np.int64)]
    starts, ends = bounds[:-1], bounds[1:]
    is_target = cache.read_target_mask(np.zeros(1, np.int64), cache.num_tokens)[0]
    is_target[cache.offsets[:-1][lengths > 0]] = False  # the first token of a document is never a target
    targets_before = np.concatenate([[0], np.cumsum(is_target)])
    if truncation == "keep_end":
        starts = np.maximum(starts, ends - (seq_len + 1))  # an overlong document is alone in its sequence
    # Nothing precedes the first token of a sequence, so it is not a target.
    first = np.minimum(starts + 1, ends)
    has_targets = targets_before[np.minimum(ends, starts + seq_len + 1)] > targets_before[first]
    lost = np.maximum(lengths - (seq_len + 1), 0)
    num_overlong, num_dropped_tokens = int((lost > 0).sum()), int(lost.sum())
    if truncation == "drop_overlength":
        fits = ends - starts <= seq_len + 1
        num_dropped_tokens = int((ends - starts)[~fits].sum())
        starts, ends, has_targets = starts[fits], ends[fits], has_targets[fits]
    counts = (num_overlong, num_dropped_tokens, int((~has_targets).sum()))
    return PackedDocuments(starts[has_targets], ends[has_targets], *counts, truncation=truncation)


@dataclass(frozen=True)
class Windows:
    """Overlapping sequences.

    Attributes:
        stride: tokens from the start of a sequence to the start of the next.
        train_overlap: compute the loss also on the tokens that the sequence before has as targets.
    """

    stride: int
    train_overlap: bool


class PackedSequences(ContiguousExamples):
    """The sequences of a token cache."""

    def __init__(
        self,
        cache: TokenCache,
        seq_len: int,
        packed: PackedDocuments | None = None,
        *,
        ignored_id: int | None = None,
        windows: Windows | None = None,
    ):
        """Args:
        packed: None if documents are split at sequence boundaries.
        ignored_id: a token that is never a target; None if all may be.
        windows: how sequences overlap if documents are split; None if they do not.
        """
        self.cache = cache
        self.seq_len = seq_len
        self.packed = packed
        self._ignored_id = ignored_id
        self._windows = windows or Windows(seq_len, True)
        overlap = None if windows is None else asdict(windows)
        self.arrangement = given(windows=overlap, ignored_id=ignored_id)

    def __len__(self) -> int:
        if self.packed is not None:
            return len(self.packed.starts)
        # The last token is never an input: no target follows it.
        beyond_first = max(0, self.cache.num_tokens - 1 - self.seq_len)
        return 1 + -(-beyond_first // self._windows.stride)

    @property
    def padding(self) -> float:
        num_positions = len(self) * self.seq_len
        if self.packed is None:
            end = (len(self) - 1) * self._windows.stride + self.seq_len
            return (end - (self.cache.num_tokens - 1)) / num_positions
        return 1 - float(np.minimum(self.packed.ends - self.packed.starts, self.seq_len).sum()) / num_positions

    @property
    def summary(self) -> str | None:
        packed = self.packed
        if packed is None:
            return None
        parts = [f"{len(self):,} sequences of {self.seq_len:,} tokens, {self.padding:.1%} padding"]
        if self.cache.target_mask is not None:
            parts.append(f"loss on {self.cache.trained_share:.1%} of the documents' tokens")
        if packed.num_overlong:
            fate = TRUNCATION_TEXT[packed.truncation].done
            parts.append(
                f"{packed.num_overlong:,} documents are longer and were {fate}, losing"
                f" {packed.num_dropped_tokens:,} of {self.cache.num_tokens:,} tokens"
            )
        if packed.num_without_targets:
            parts.append(
                f"{packed.num_without_targets:,} sequences left out: truncation removed every token the loss is computed on"
            )
        return "; ".join(parts)

    def num_apart_from(self, first: int) -> int:
        # Without loss on the overlap, no target is in two sequences, and what precedes it may have been trained on.
        if self.packed is not None or not self._windows.train_overlap:
            return first
        return max(0, first + 1 - -(-self.seq_len // self._windows.stride))

    def starts(self, indices: np.ndarray) -> np.ndarray:
        return indices * self._windows.stride if self.packed is None else self.packed.starts[indices]

    def read(self, indices: np.ndarray) -> Columns:
        """The columns of `TokenBatch`, [len(indices), seq_len] each."""
        starts = self.starts(indices)
        ends = np.full_like(starts, self.cache.num_tokens) if self.packed is None else self.packed.ends[indices]
        columns = np.arange(self.seq_len + 1, dtype=np.int32)
        inside = columns < (ends - starts)[:, None]
        begins = self._begins(starts)
        ids = self.cache.read(starts, self.seq_len + 1)
        is_target = inside & ~begins
        if self.packed is not None:
            ids *= inside
        elif not self._windows.train_overlap:
            is_target &= (columns > self.seq_len - self._windows.stride) | (starts == 0)[:, None]
        if self.cache.target_mask is not None:
            is_target &= self.cache.read_target_mask(starts, self.seq_len + 1)
        if self._ignored_id is not None:
            is_target &= ids != self._ignored_id
        return shifted_columns(ids, inside, is_target, begins)

    def show(self, index: int, tokenizer: Any) -> Iterator[str]:
        row = {name: column[0] for name, column in self.read(np.array([index])).items()}
        yield f"loss on {int(row['loss_mask'].sum())} of {self.seq_len} tokens"
        first = int(self.starts(np.array([index]))[0])
        for start, text in documents_as_text(row, tokenizer):
            yield f"--- {self.cache.source_of(first + start)} ---\n{text}"

    def _begins(self, starts: np.ndarray) -> np.ndarray:
        """bool [len(starts), seq_len + 1]: whether a document, or the sequence itself, begins at this position."""
        offsets = self.cache.offsets
        # Two searches per sequence instead of one per token: only documents that begin in the sequence are touched.
        first, end = np.searchsorted(offsets, [starts, starts + self.seq_len + 1])
        counts = end - first
        rows = np.repeat(np.arange(len(starts)), counts)
        ranks = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.zeros((len(starts), self.seq_len + 1), bool)
        begins[rows, offsets[first[rows] + ranks] - starts[rows]] = True
        begins[:, 0] = True
        return begins
