"""Preference pairs: two completions of the same prompt, side by side."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from haliax import Axis

from jaxlm.core.axes import PAIR, POSITION
from jaxlm.core.types import PairBatch
from jaxlm.data.batch import BatchSpec, Columns, random_tokens, token_columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.config import DataConfig
from jaxlm.data.examples import ContiguousExamples, documents_as_text
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.pairs import PairsFormat

_HALVES = ("chosen", "rejected")


@DataConfig.register_subclass("pairs")
@dataclass(frozen=True)
class PairsConfig(DataConfig):
    """Pairs of a chosen and a rejected completion of the same prompt. `model.seq_len` limits each half; longer ones are
    truncated at the end.
    """

    reads: ClassVar[str] = "pairs"

    format: FormatConfig = field(default_factory=PairsFormat)

    def batch_spec(self, seq_len: int) -> BatchSpec[PairBatch]:
        return BatchSpec(PairBatch.of, token_columns(Axis(PAIR, 2), Axis(POSITION, seq_len)))

    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> "Pairs":
        del record_format
        return Pairs(cache, seq_len)

    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        return random_tokens((num_examples, 2, seq_len), vocab_size, seed)


class Pairs(ContiguousExamples):
    """The pairs of a token cache: each document is prompt and chosen completion, then prompt and rejected completion."""

    def __init__(self, cache: TokenCache, seq_len: int):
        self.cache = cache
        self.seq_len = seq_len
        assert cache.target_mask is not None, "pairs have a target mask"
        starts, ends = cache.offsets[:-1], cache.offsets[1:]
        is_target = cache.target_mask.astype(bool)
        # The second half begins where a completion ends inside a document.
        completion_ends = np.flatnonzero(is_target[:-1] & ~is_target[1:]) + 1
        middles = completion_ends[~np.isin(completion_ends, cache.offsets)]
        assert len(middles) == len(starts), "each document has two halves"
        bounds = np.stack([starts, middles, ends], axis=1)
        first_targets = np.stack([_first_true(is_target, starts), _first_true(is_target, middles)], axis=1)
        fits = (first_targets - bounds[:, :2] <= seq_len).all(axis=1)
        self._bounds = bounds[fits]
        sizes = np.diff(self._bounds, axis=1)
        self._num_truncated = int((sizes > seq_len + 1).any(axis=1).sum())
        self._num_without_targets = int((~fits).sum())

    def __len__(self) -> int:
        return len(self._bounds)

    @property
    def padding(self) -> float:
        sizes = np.minimum(np.diff(self._bounds, axis=1), self.seq_len)
        return 1 - float(sizes.sum()) / max(1, sizes.size * self.seq_len)

    @property
    def summary(self) -> str:
        parts = [f"{len(self):,} pairs of sequences of {self.seq_len:,} tokens, {self.padding:.1%} padding"]
        if self._num_truncated:
            parts.append(f"{self._num_truncated:,} pairs are longer and were truncated")
        if self._num_without_targets:
            parts.append(
                f"{self._num_without_targets:,} pairs left out: their prompt leaves no room for a token of a completion"
            )
        return "; ".join(parts)

    def starts(self, indices: np.ndarray) -> np.ndarray:
        return self._bounds[indices, 0]

    def read(self, indices: np.ndarray) -> Columns:
        """The columns of `TokenBatch`, [len(indices), 2, seq_len] each."""
        starts, ends = self._bounds[indices, :2], self._bounds[indices, 1:]
        columns = np.arange(self.seq_len + 1, dtype=np.int32)
        inside = columns < (ends - starts)[..., None]
        ids = self.cache.read(starts.ravel(), self.seq_len + 1).reshape(inside.shape) * inside
        is_target = self.cache.read_target_mask(starts.ravel(), self.seq_len + 1).reshape(inside.shape) & inside
        is_input = inside[..., :-1]
        return {
            "tokens": ids[..., :-1].copy(),
            "targets": ids[..., 1:].copy(),
            "loss_mask": is_target[..., 1:].astype(np.float32),
            "segment_ids": is_input.astype(np.int32),
            "positions": columns[:-1] * is_input,
        }

    def show(self, index: int, tokenizer: Any) -> Iterator[str]:
        columns = {name: column[0] for name, column in self.read(np.array([index])).items()}
        num_targets = columns["loss_mask"].sum(axis=1).astype(int)
        yield f"loss on {num_targets[0]} (chosen) and {num_targets[1]} (rejected) of {self.seq_len} tokens"
        source = self.cache.source_of(int(self._bounds[index, 0]))
        for number, half in enumerate(_HALVES):
            row = {name: column[number] for name, column in columns.items()}
            for _, text in documents_as_text(row, tokenizer):
                yield f"--- {source}, {half} ---\n{text}"


def _first_true(is_target: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The first true position from each start on."""
    targets = np.flatnonzero(is_target)
    return targets[np.searchsorted(targets, starts)]
