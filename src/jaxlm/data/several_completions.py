"""Several completions of the same prompt, side by side."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxlm.data.batch import Columns, shifted_columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.examples import ContiguousExamples, WrappedExamples, documents_as_text
from jaxlm.data.formats.base import FATES, Truncation

_COMPARED_FIRST = 16  # tokens of each completion, which tell most of them apart
_READ_AT_ONCE = 1000


class SeveralCompletions(ContiguousExamples):
    """The examples of a token cache in which each document is the prompt and its first completion, the prompt and its
    second, and so on.
    """

    def __init__(
        self, cache: TokenCache, seq_len: int, names: Sequence[str], what: str, truncation: Truncation = "keep_start"
    ):
        """Args:
        names: what each completion is called when it is shown.
        what: what the examples are called, as in `pairs`.
        truncation: what becomes of a sequence that is too long. `keep_end` cuts the beginning off each sequence of an
            example as far as it has to; `drop_overlength` leaves out examples of which any sequence is too long.
        """
        self.cache = cache
        self.seq_len = seq_len
        self._names, self._what = names, what
        assert cache.target_mask is not None, "completions have a target mask"
        starts, ends = cache.offsets[:-1], cache.offsets[1:]
        is_target = cache.target_mask.astype(bool)
        # The next sequence begins where a completion ends inside a document.
        completion_ends = np.flatnonzero(is_target[:-1] & ~is_target[1:]) + 1
        inner = completion_ends[~np.isin(completion_ends, cache.offsets)]
        assert len(inner) == len(starts) * (len(names) - 1), f"each document has {len(names)} completions"
        bounds = np.concatenate([starts[:, None], inner.reshape(len(starts), len(names) - 1), ends[:, None]], axis=1)
        starts, ends = bounds[:, :-1], bounds[:, 1:]
        first_targets = _first_true(is_target, starts)
        is_long = (ends - starts > seq_len + 1).any(axis=1)
        if truncation == "keep_end":
            self.arrangement = {"truncation": truncation}
            starts = np.maximum(starts, ends - (seq_len + 1))
            first_targets = np.maximum(first_targets, starts + 1)  # nothing precedes the first token
        has_targets, drops = (first_targets - starts <= seq_len).all(axis=1), truncation == "drop_overlength"
        fits = ~is_long if drops else has_targets
        self.documents = np.flatnonzero(fits)
        """The document of each example."""
        self.first_targets = first_targets[fits]
        """int64 [examples, completions]: the index in the cache of each completion's first target."""
        self._starts, self._ends = starts[fits], ends[fits]
        self._truncation: Truncation = truncation
        self._num_long = int((is_long if drops else is_long & fits).sum())
        without_targets = starts[:0, 0] if drops else starts[~fits, 0]
        self._num_without_targets = len(without_targets)
        self._without_targets = [self.cache.source_of(int(start)) for start in without_targets[:1]]

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def padding(self) -> float:
        sizes = np.minimum(self._ends - self._starts, self.seq_len)
        return 1 - float(sizes.sum()) / max(1, sizes.size * self.seq_len)

    @property
    def summary(self) -> str:
        what = self._what
        parts = [f"{len(self):,} {what} of sequences of {self.seq_len:,} tokens, {self.padding:.1%} padding"]
        if self._num_long:
            parts.append(f"longer {what} that were {FATES[self._truncation].done}: {self._num_long:,}")
        if self._num_without_targets:
            parts.append(
                f"{self._num_without_targets:,} {what} left out: their prompt leaves no room for a token of a completion"
                f" (the first: {self._without_targets[0]})"
            )
        return "; ".join(parts)

    def place(self, index: int) -> str:
        """Where an example comes from, for messages."""
        return self.cache.source_of(int(self._starts[index, 0]))

    def with_equal_completions(self) -> np.ndarray:
        """The indices of the examples whose completions are all equal, as far as `seq_len` reaches.

        None are found in a cache at a URL, which would have to be downloaded.
        """
        if self.cache.blocks is not None:
            return np.zeros(0, np.int64)
        sizes = np.minimum(self._ends - self._starts, self.seq_len + 1)
        candidates = np.flatnonzero((sizes == sizes[:, :1]).all(axis=1))
        begin = self.cache.read(self.first_targets[candidates].ravel(), _COMPARED_FIRST)
        begin = begin.reshape(*self.first_targets[candidates].shape, _COMPARED_FIRST)
        left = sizes[candidates] - (self.first_targets - self._starts)[candidates]
        begin = begin * (np.arange(_COMPARED_FIRST) < left[..., None])
        candidates = candidates[(begin == begin[:, :1]).all(axis=(1, 2))]
        equal = [np.zeros(0, np.int64)]
        for indices in np.split(candidates, range(_READ_AT_ONCE, len(candidates), _READ_AT_ONCE)):
            columns = self.read(indices)
            same = [(columns[name] == columns[name][:, :1]).all(axis=(1, 2)) for name in ("tokens", "targets")]
            equal.append(indices[np.logical_and(*same)])
        return np.concatenate(equal)

    def starts(self, indices: np.ndarray) -> np.ndarray:
        return self._starts[indices, 0]

    def ends(self, indices: np.ndarray) -> np.ndarray:
        """int64: the index in the cache after each example's last token."""
        return self._ends[indices, -1]

    def read(self, indices: np.ndarray) -> Columns:
        """The columns of `TokenBatch`, [len(indices), completions, seq_len] each."""
        starts, ends = self._starts[indices], self._ends[indices]
        columns = np.arange(self.seq_len + 1, dtype=np.int32)
        inside = columns < (ends - starts)[..., None]
        ids = self.cache.read(starts.ravel(), self.seq_len + 1).reshape(inside.shape) * inside
        is_target = self.cache.read_target_mask(starts.ravel(), self.seq_len + 1).reshape(inside.shape) & inside
        return shifted_columns(ids, inside, is_target)

    def show(self, index: int, tokenizer: Any) -> Iterator[str]:
        columns = {name: column[0] for name, column in self.read(np.array([index])).items()}
        num_targets = columns["loss_mask"].sum(axis=1).astype(int)
        counts = [f"{count} ({name})" for count, name in zip(num_targets, self._names, strict=True)]
        first, last = ", ".join(counts[:-1]), counts[-1]
        yield f"loss on {' and '.join(filter(None, (first, last)))} of {self.seq_len} tokens"
        source = self.place(index)
        for number, completion in enumerate(self._names):
            row = {name: column[number] for name, column in columns.items()}
            for _, text in documents_as_text(row, tokenizer):
                yield f"--- {source}, {completion} ---\n{text}"


class ComparedCompletions(WrappedExamples):
    """Examples whose completions are compared. Those that are equal stay, because other losses can read them."""

    def __init__(self, examples: SeveralCompletions, equal: np.ndarray, wording: tuple[str, str], if_all: str):
        """Args:
        equal: the indices of the examples whose completions are equal in what is compared.
        wording: what they are, after their number, and what follows from that.
        if_all: what follows if that is true of all examples, with advice.
        """
        super().__init__(examples)
        self._equal = f"{len(equal):,} {wording[0]} {first_of(examples, equal)}" if len(equal) else None
        self._consequence, self._if_all = wording[1], if_all
        self._are_all_equal = 0 < len(equal) == len(examples)

    @property
    def summary(self) -> str | None:
        return "; ".join(filter(None, (super().summary, self._equal and f"{self._equal}: {self._consequence}")))

    def no_signal(self) -> str | None:
        return f"all {self._equal}, {self._if_all}" if self._are_all_equal else None


def first_of(examples: SeveralCompletions, indices: np.ndarray) -> str:
    """The place of the first of some examples, for messages."""
    return f"(the first: {examples.place(int(indices[0]))})"


def _first_true(is_target: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The first true position from each start on."""
    targets = np.flatnonzero(is_target)
    return targets[np.searchsorted(targets, starts)]
