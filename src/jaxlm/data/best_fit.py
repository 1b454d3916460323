"""Packs documents into full rows: each row takes the largest waiting documents that fit, and cuts one for what is left.

waiting   5 9 3 20 7 16 2 11        tokens of each document, BOS included
rows      16 | 11 5 | 9 7 | ...     rows of 16 tokens: 15 inputs, and one more for the last target

A document begins with BOS, so every row does, and BOS is the target that ends the document before it. The rest of a cut
document is lost, unless it waits for a later row (`fill: split`).

The rows follow from the lengths of the documents. They are computed once (`data/cache/derived_arrays.py`), so a row is read
by its number, like any other example.

Rows may never end (`WrappedRows`): after the last document comes the first again, and the documents of both passes wait
together. A row follows from all before it, so rows are packed in parts, each from what waited at the end of the part
before. The first part is one pass over the documents.

Source: nanochat's loader (github.com/karpathy/nanochat, nanochat/dataloader.py).
"""

import heapq
import itertools
import math
import threading
import zlib
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from jaxlm.core.field_types import PositiveInt
from jaxlm.data.base import given
from jaxlm.data.batch import Columns, shifted_columns
from jaxlm.data.cache.derived_arrays import ROW_INDEX, RowIndex
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.examples import Examples, documents_as_text
from jaxlm.data.formats.base import TRUNCATION_TEXT, Truncation
from jaxlm.reading.decode import encode

Fill = Literal["crop", "split", "pad"]


class WaitingDocuments:
    """Documents, or their rests, by length. Of several of the same length, the one that came first goes first."""

    def __init__(self, capacity: int):
        self.count = 0
        self.capacity = capacity
        self._starts: defaultdict[int, deque[int]] = defaultdict(deque)  # by length
        self._lengths = 0  # bit n is set if a document of n tokens waits
        self._longer: list[tuple[int, int, int]] = []  # a heap of (length, order of arrival, start)
        self._arrivals = itertools.count()

    def add_all(self, documents: Iterable[tuple[int, int]]) -> None:
        """Adds documents, given as start and length."""
        for start, length in documents:
            self.add(start, length)

    def add(self, start: int, length: int) -> None:
        self.count += 1
        if length > self.capacity:
            heapq.heappush(self._longer, (length, next(self._arrivals), start))
        else:
            self._starts[length].append(start)
            self._lengths |= 1 << length

    def largest(self, room: int) -> int:
        """The length of the largest document of at most `room` tokens; 0 if there is none."""
        return max((self._lengths & ((2 << room) - 1)).bit_length() - 1, 0)

    def take(self, length: int) -> int:
        """Removes the first document of this length, and returns its start."""
        self.count -= 1
        starts = self._starts[length]
        start = starts.popleft()
        if not starts:
            self._lengths ^= 1 << length
        return start

    def take_shortest(self) -> tuple[int, int]:
        """Removes the shortest document, and returns its start and length."""
        if self._lengths:
            length = (self._lengths & -self._lengths).bit_length() - 1
            return self.take(length), length
        self.count -= 1
        length, _, start = heapq.heappop(self._longer)
        return start, length

    def as_array(self) -> np.ndarray:
        """int64 [documents, 2]: start and length, in an order that gives the same choices if they are added again."""
        shorter = [(start, length) for length in sorted(self._starts) for start in self._starts[length]]
        longer = [(start, length) for length, _, start in sorted(self._longer)]
        return np.array([*shorter, *longer], np.int64).reshape(-1, 2)


def pack_rows(
    waiting: WaitingDocuments,
    batches: Iterator[Iterable[tuple[int, int]]],
    buffer_size: int,
    fill: Fill = "crop",
    *,
    num_pieces: float = math.inf,
) -> RowIndex:
    """Packs rows until no document is waiting, or until the rows have `num_pieces` pieces or more.

    Args:
        batches: the documents that are added together, of start and length, whenever fewer than `buffer_size` wait.
        fill: as in `BestFitConfig`.
    """
    firsts, starts, lengths = array("q", [0]), array("q"), array("i")
    num_cuts = num_dropped_tokens = 0
    while len(starts) < num_pieces:
        room = waiting.capacity
        while room:
            while waiting.count < buffer_size and (batch := next(batches, None)):
                waiting.add_all(batch)
            length = waiting.largest(room)
            if length:
                start = waiting.take(length)
            elif fill == "pad" or not waiting.count:
                break
            else:
                start, whole = waiting.take_shortest()
                length = room
                if fill == "crop":
                    num_cuts, num_dropped_tokens = num_cuts + 1, num_dropped_tokens + whole - room
                else:
                    num_cuts += room > 1
                    # The last token of a row is only a target. It is the first input of the rest.
                    waiting.add(start + room - 1, whole - room + 1)
            starts.append(start)
            lengths.append(length)
            room -= length
        if waiting.capacity - room >= 2:
            firsts.append(len(starts))
            continue
        num_dropped_tokens += waiting.capacity - room  # a single token has no target
        del starts[firsts[-1] :], lengths[firsts[-1] :]
        if not waiting.count:
            break
    pieces = np.array(starts, np.int64), np.array(lengths, np.int32)
    return RowIndex(np.array(firsts, np.int64), *pieces, num_cuts, num_dropped_tokens)


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
        """Args: folder, made_from: as in `Derived.open_or_compute`, without what tells the parts apart."""
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
                part = _open(self._folder, {**self._made_from, "part": number}, lambda: self._packed(number))
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


_CHUNK = 1 << 16  # documents whose lengths are Python integers at a time
_VERSION = 1  # of the rows that the same documents and keys give
_TOO_MANY_LOST = 0.5  # of the tokens
_IN_INDEX = {"keep_start": {}, "keep_end": {"keep_end": True}, "drop_overlength": {"drop_overlong": True}}
Rows = RowIndex | WrappedRows


@dataclass(frozen=True)
class BestFitConfig:
    """Packs documents into rows that begin with BOS. Each row takes, again and again, the largest waiting document that fits.

    Attributes:
        fill: what fills the end of a row for which every waiting document is too long. `crop`: the beginning of the shortest
            one, whose rest is lost, as in nanochat. `split`: the same, but the rest waits for a later row, so no token is
            lost. `pad`: nothing; only documents longer than a row lose their ends.
        buffer_size: documents that wait. The more, the fewer are cut.
        refill_size: documents that are added at once whenever fewer wait.
        document_mask: let tokens attend only to their own document, and count positions from its beginning. By default a
            row is one sequence, as in nanochat.
        wrap: let the documents wait together with those of the next pass, so that the rows never end and each pass has rows
            of its own, and end what is added at once with each row group of a Parquet file, both as in nanochat. `false`:
            the last rows of a pass take what still waits, and all passes have the same rows. Null is `true` where documents
            are trained on in their order, all of them: with `fill: crop`, `data.shuffle: false` and without
            `data.num_validation_sequences`.
        type: must be `best_fit`.
    """

    fill: Fill = "crop"
    buffer_size: PositiveInt = 1000
    refill_size: PositiveInt = 128
    document_mask: bool = False
    wrap: bool | None = None
    type: Literal["best_fit"] = "best_fit"

    def identity(self) -> dict[str, Any]:
        """The keys as plain JSON, where null no longer stands for a value. Runs of earlier versions have no `wrap`."""
        keys = encode(self)
        return keys if self.wrap else {name: value for name, value in keys.items() if name != "wrap"}


def pack_best_fit(
    offsets: np.ndarray, capacity: int, config: BestFitConfig, *, truncation: Truncation = "keep_start"
) -> RowIndex:
    """The rows of one pass over the documents. When all of them have come, the last rows take what still waits.

    Args:
        offsets: int64 [documents + 1]: the first token of each document, then the total number of tokens.
        capacity: tokens in a row, at least 2.
        truncation: what becomes of documents that are longer than a row, with `fill: pad`.
    """
    sizes = np.diff(offsets)
    too_long = np.maximum(sizes - capacity, 0) if config.fill == "pad" else np.zeros_like(sizes)
    if truncation == "drop_overlength":
        too_long = np.where(sizes > capacity, sizes, 0)
    starts_at = offsets[:-1] + too_long if truncation == "keep_end" else offsets[:-1]
    documents, waiting = _documents(starts_at, sizes - too_long), WaitingDocuments(capacity)
    batches = iter(lambda: list(itertools.islice(documents, config.refill_size)), [])
    index = pack_rows(waiting, batches, config.buffer_size, config.fill)
    num_cuts, num_dropped_tokens = int((too_long > 0).sum()), int(too_long.sum())
    return replace(
        index, num_cuts=index.num_cuts + num_cuts, num_dropped_tokens=index.num_dropped_tokens + num_dropped_tokens
    )


def _documents(starts: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Start and length of each document that is not empty."""
    for begin in range(0, len(lengths), _CHUNK):
        chunk = slice(begin, begin + _CHUNK)
        pairs = zip(starts[chunk].tolist(), lengths[chunk].tolist(), strict=True)
        yield from (pair for pair in pairs if pair[1])


def open_rows(cache: TokenCache, seq_len: int, config: BestFitConfig, *, truncation: Truncation = "keep_start") -> Rows:
    """The rows of a token cache, from the index beside it. Builds the index if there is none."""
    keys = {"fill": config.fill, "buffer_size": config.buffer_size, "refill_size": config.refill_size}
    made_from = {"version": _VERSION, "tokens": cache.fingerprint, "seq_len": seq_len, **keys}
    made_from |= _IN_INDEX[truncation]
    if config.wrap:
        documents = DocumentBatches.of(cache, config.refill_size)
        return WrappedRows(documents, seq_len + 1, config.buffer_size, cache.folder.parent / "packed", made_from)
    build = lambda: pack_best_fit(cache.offsets, seq_len + 1, config, truncation=truncation)  # noqa: E731
    return _open(cache.folder.parent / "packed", made_from, build)


def _open(folder: Path, made_from: Mapping[str, Any], build: Callable[[], RowIndex]) -> RowIndex:
    return ROW_INDEX.open_or_compute(folder, made_from, build, lambda _: None)


class _Placed(NamedTuple):
    """The pieces of some rows, in order.

    Attributes:
        starts, lengths: of each piece.
        row, column: where each piece begins.
        inside: bool [rows, seq_len + 1], false for padding.
    """

    starts: np.ndarray
    lengths: np.ndarray
    row: np.ndarray
    column: np.ndarray
    inside: np.ndarray


class BestFitSequences(Examples):
    """The rows of a token cache."""

    def __init__(
        self,
        cache: TokenCache,
        seq_len: int,
        config: BestFitConfig,
        rows: Rows,
        *,
        ignored_id: int | None = None,
        truncation: Truncation = "keep_start",
    ):
        """Args:
        rows: what the rows consist of.
        ignored_id: a token that is never a target; None if all may be.
        truncation: what became of documents longer than a row.
        """
        self.cache = cache
        self.seq_len = seq_len
        self.is_endless = rows.is_endless
        self.arrangement = {"packing": config.identity(), **given(ignored_id=ignored_id)}
        self._config = config
        self._ignored_id = ignored_id
        self._rows, self._index = rows, rows.first_pass
        self._fate = TRUNCATION_TEXT[truncation].done

    def __len__(self) -> int:
        return len(self._index)

    @property
    def padding(self) -> float:
        totals = np.add.reduceat(self._index.lengths, self._index.firsts[:-1], dtype=np.int64)
        return 1 - float(np.minimum(totals, self.seq_len).sum()) / (len(self) * self.seq_len)

    @property
    def summary(self) -> str:
        index, num_tokens = self._index, self.cache.num_tokens
        filled = f"{len(self):,} rows of {self.seq_len:,} tokens, packed by best fit, {self.padding:.2%} padding"
        if self._config.fill == "split":
            lost = (
                f"{index.num_dropped_tokens:,} of {num_tokens:,} tokens are"
                if index.num_dropped_tokens
                else "no token is"
            )
            return f"{filled}; documents were cut {index.num_cuts:,} times, and {lost} lost"
        if self.is_endless:
            filled += ", and the next pass follows without a break"
            if self.cache.documents_of_groups is None:
                filled += f" (an earlier version made {self.cache.location}, without the ends of row groups)"
        lost = index.num_dropped_tokens / num_tokens
        advice = ". Set data.packing.fill: split, which loses none" if lost > _TOO_MANY_LOST else ""
        return (
            f"{filled}; {index.num_cuts:,} of {len(self.cache.offsets) - 1:,} documents were {self._fate}, losing"
            f" {index.num_dropped_tokens:,} of {num_tokens:,} tokens ({lost:.1%}){advice}"
        )

    def starts(self, indices: np.ndarray) -> np.ndarray:
        starts, _, counts = self._rows.pieces_of(indices)
        return starts[np.cumsum(counts) - counts]

    def target_positions(self, indices: np.ndarray) -> np.ndarray:
        placed = self._placed(indices)
        before = np.cumsum(placed.lengths) - placed.lengths
        positions = np.full(placed.inside.shape, self.cache.num_tokens)
        positions[placed.inside] = np.repeat(placed.starts - before, placed.lengths) + np.arange(placed.inside.sum())
        return positions[:, 1:]

    def read_ahead(self, indices: np.ndarray) -> None:
        if self.cache.blocks is not None:
            starts, lengths, _ = self._rows.pieces_of(indices)
            self.cache.blocks.read_ahead(starts, lengths)

    def read(self, indices: np.ndarray) -> Columns:
        """The columns of `TokenBatch`, [len(indices), seq_len] each."""
        starts, lengths, row, column, inside = self._placed(indices)
        ids = np.zeros(inside.shape, np.int32)
        ids[inside] = self.cache.read_ranges(starts, lengths)
        is_target = inside.copy()
        if self.cache.target_mask is not None:
            ranges = zip(starts.tolist(), lengths.tolist(), strict=True)
            is_target[inside] = np.concatenate([self.cache.target_mask[start : start + n] for start, n in ranges]) > 0
        # The first token of a rest has been a target before.
        is_rest = self.cache.offsets[np.searchsorted(self.cache.offsets, starts)] != starts
        is_target[row[is_rest], column[is_rest]] = False
        if self._ignored_id is not None:
            is_target &= ids != self._ignored_id
        begins = self._begins(row, column, inside) if self._config.document_mask else None
        return shifted_columns(ids, inside, is_target, begins)

    def show(self, index: int, tokenizer: Any) -> Iterator[str]:
        indices = np.array([index])
        placed = self._placed(indices)
        columns = {name: column[0] for name, column in self.read(indices).items()}
        yield f"loss on {int(columns['loss_mask'].sum())} of {self.seq_len} tokens"
        begins = self._begins(placed.row, placed.column, placed.inside)[0]
        columns["segment_ids"] = (begins.cumsum() * placed.inside[0])[:-1]
        pieces = zip(placed.starts.tolist(), placed.lengths.tolist(), strict=True)
        for (_, text), piece in zip(documents_as_text(columns, tokenizer), pieces, strict=False):
            yield f"--- {self._describe(*piece)} ---\n{text}"

    def _describe(self, start: int, length: int) -> str:
        """The source of a piece and, if it is not a whole document, which of its tokens they are."""
        offsets = self.cache.offsets
        number = int(np.searchsorted(offsets, start, side="right")) - 1
        first, size = start - int(offsets[number]), int(offsets[number + 1] - offsets[number])
        part = f", tokens {first + 1:,} to {first + length:,} of {size:,}" if length < size else ""
        return f"{self.cache.source_of(start)}{part}"

    def _placed(self, indices: np.ndarray) -> _Placed:
        starts, lengths, counts = self._rows.pieces_of(indices)
        totals = np.add.reduceat(lengths, np.cumsum(counts) - counts, dtype=np.int64)
        before_row = np.repeat(np.cumsum(totals) - totals, counts)
        column = np.cumsum(lengths) - lengths - before_row
        inside = np.arange(self.seq_len + 1) < totals[:, None]
        return _Placed(starts, lengths, np.repeat(np.arange(len(indices)), counts), column, inside)

    def _begins(self, row: np.ndarray, column: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """bool [rows, seq_len + 1]: whether a piece begins at this position."""
        begins = np.zeros(inside.shape, bool)
        begins[row, column] = True
        return begins
