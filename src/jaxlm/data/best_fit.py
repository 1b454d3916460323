"""Packs documents into full rows: each row takes the largest waiting documents that fit, and cuts one for what is left.

waiting   5 9 3 20 7 16 2 11        tokens of each document, BOS included
rows      16 | 11 5 | 9 7 | ...     rows of 16 tokens: 15 inputs, and one more for the last target

A document begins with BOS, so every row does, and BOS is the target that ends the document before it. The rest of a cut
document is lost, unless it waits for a later row (`fill: split`).

The rows follow from the lengths of the documents. They are computed once (`data/cache/row_index.py`), so a row is read by
its number, like any other example.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxlm.core.field_types import PositiveInt
from jaxlm.data.base import given
from jaxlm.data.batch import Columns
from jaxlm.data.cache.row_index import RowIndex, open_or_index
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.examples import Examples, documents_as_text
from jaxlm.data.formats.base import FATES, Truncation
from jaxlm.data.waiting_documents import Fill, WaitingDocuments, pack_rows
from jaxlm.data.wrapped_rows import DocumentBatches, WrappedRows
from jaxlm.reading.decode import encode

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
    num_cuts, num_lost = int((too_long > 0).sum()), int(too_long.sum())
    return replace(index, num_cuts=index.num_cuts + num_cuts, num_lost=index.num_lost + num_lost)


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
    return open_or_index(cache.folder.parent / "packed", made_from, build)


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
        self._fate = FATES[truncation].done

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
            lost = f"{index.num_lost:,} of {num_tokens:,} tokens are" if index.num_lost else "no token is"
            return f"{filled}; documents were cut {index.num_cuts:,} times, and {lost} lost"
        if self.is_endless:
            filled += ", and the next pass follows without a break"
            if self.cache.documents_of_groups is None:
                filled += f" (an earlier version made {self.cache.location}, without the ends of row groups)"
        lost = index.num_lost / num_tokens
        advice = ". Set data.packing.fill: split, which loses none" if lost > _TOO_MANY_LOST else ""
        return (
            f"{filled}; {index.num_cuts:,} of {len(self.cache.offsets) - 1:,} documents were {self._fate}, losing"
            f" {index.num_lost:,} of {num_tokens:,} tokens ({lost:.1%}){advice}"
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
        inputs, shifted = slice(None, -1), slice(1, None)
        is_input = inside[:, inputs]
        positions = np.broadcast_to(np.arange(self.seq_len, dtype=np.int32), is_input.shape)
        segment_ids = is_input.astype(np.int32)
        if self._config.document_mask:
            begins = self._begins(row, column, inside)[:, inputs]
            segment_ids = begins.cumsum(axis=1, dtype=np.int32) * is_input
            positions = positions - np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
        return {
            "tokens": ids[:, inputs].copy(),
            "targets": ids[:, shifted].copy(),
            "loss_mask": is_target[:, shifted].astype(np.float32),
            "segment_ids": segment_ids,
            "positions": positions * is_input,
        }

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
