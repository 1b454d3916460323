"""Rows that never end: after the last document comes the first again, and the documents of both passes wait together.

Like nanochat's loader (github.com/karpathy/nanochat, nanochat/dataloader.py). A row follows from all before it, so rows are
packed in parts, each from what waited at the end of the part before. The first part is one pass over the documents.
"""

import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxlm.data.cache.row_index import RowIndex, open_or_index
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.waiting_documents import WaitingDocuments, pack_rows

_PART = 1 << 16  # documents in the parts after the first: packed in a fifth of a second
_MAX_OPEN = 4  # parts after the first


@dataclass(frozen=True)
class DocumentBatches:
    """Documents in the batches in which they are added to those that wait.

    Attributes:
        offsets: int64 [documents + 1]: the first token of each document, then the total number of tokens.
        ends: int64, the number of documents until the end of each batch, in one pass.
    """

    offsets: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, cache: TokenCache, size: int) -> "DocumentBatches":
        """Batches of `size` documents. The last one of a row group, or of a file without row groups, has what is left."""
        assert (np.diff(cache.offsets) > 0).all(), "a document is empty, and does not begin with BOS"
        groups = cache.documents_of_groups
        ends = np.cumsum(list(cache.documents_of.values()) if groups is None else groups)
        firsts = np.concatenate([[0], ends[:-1]]).tolist()
        inner = [np.arange(first + size, end, size) for first, end in zip(firsts, ends.tolist(), strict=True)]
        return cls(cache.offsets, np.unique(np.concatenate([*inner, ends[ends > 0]])).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def after(self, num_documents: int) -> Iterator[Iterator[tuple[int, int]]]:
        """The batches after a number of documents of the endless stream, of start and length."""
        first = num_documents % len(self)
        while True:
            for end in self.ends[np.searchsorted(self.ends, first, side="right") :].tolist():
                offsets = self.offsets[first : end + 1]
                yield zip(offsets[:-1].tolist(), np.diff(offsets).tolist(), strict=True)
                first = end
            first = 0


def pack_part(
    documents: DocumentBatches, capacity: int, buffer_size: int, *, before: np.ndarray, consumed: int, until: int
) -> RowIndex:
    """The next rows, until these and all before them consist of at least `until` documents.

    Args:
        before: those that wait, int64 [documents, 2].
        consumed: how many the rows before have.
    """
    waiting = WaitingDocuments(capacity)
    waiting.add_all(before.tolist())
    index = pack_rows(waiting, documents.after(consumed + len(before)), buffer_size, num_pieces=until - consumed)
    return replace(index, waiting=waiting.as_array())


class WrappedRows:
    """The rows by number. Parts are packed when one of their rows is first read, and kept on disk."""

    is_endless: ClassVar[bool] = True

    def __init__(
        self, documents: DocumentBatches, capacity: int, buffer_size: int, folder: Path, made_from: Mapping[str, Any]
    ):
        """Args: folder, made_from: as in `open_or_index`, without what tells the parts apart."""
        self._documents, self._capacity, self._buffer_size = documents, capacity, buffer_size
        self._folder, self._made_from = folder, {**made_from, "batches": zlib.crc32(documents.ends.data)}
        self._parts: dict[int, RowIndex] = {}
        self._row_ends: list[int] = []
        self._consumed = [0]  # documents in the rows before each part
        self._lock = threading.RLock()  # batches are read in one thread and may be described in another
        self._open_until(1)

    @property
    def first_pass(self) -> RowIndex:
        """The rows of the first pass over the documents."""
        return self._parts[0]

    def pieces_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Like `RowIndex.pieces_of`. Rows have any numbers."""
        self._open_until(int(rows.max()) + 1)
        parts = np.searchsorted(self._row_ends, rows, side="right")
        if (parts == parts[0]).all():
            return self._pieces_in(int(parts[0]), rows)
        pieces = [self._pieces_in(int(part), rows[number : number + 1]) for number, part in enumerate(parts)]
        starts, lengths, counts = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        return starts, lengths, counts

    def _pieces_in(self, part: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._part(part).pieces_of(rows - (self._row_ends[part - 1] if part else 0))

    def _open_until(self, num_rows: int) -> None:
        with self._lock:
            while not self._row_ends or self._row_ends[-1] < num_rows:
                part = self._part(len(self._row_ends))
                self._consumed.append(self._consumed[-1] + len(part.starts))
                self._row_ends.append(len(part) + (self._row_ends[-1] if self._row_ends else 0))

    def _part(self, number: int) -> RowIndex:
        """A part, from the disk if it is not among those that are open. Each open one takes four descriptors."""
        with self._lock:
            if number not in self._parts:
                part = open_or_index(self._folder, {**self._made_from, "part": number}, lambda: self._packed(number))
                self._parts[number] = part
                for oldest in [opened for opened in self._parts if opened][:-_MAX_OPEN]:
                    del self._parts[oldest]
            return self._parts[number]

    def _packed(self, number: int) -> RowIndex:
        before = self._part(number - 1).waiting if number else None
        return pack_part(
            self._documents,
            self._capacity,
            self._buffer_size,
            before=np.zeros((0, 2), np.int64) if before is None else before,
            consumed=self._consumed[number],
            until=len(self._documents) + number * _PART,
        )
