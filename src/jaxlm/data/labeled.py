"""Tokens with a label for each of them, which says what the model should predict there."""

from collections.abc import Iterator
from dataclasses import field
from typing import Any, ClassVar

import numpy as np
from haliax import Axis

from jaxlm.core.axes import POSITION
from jaxlm.core.values.batch_types import LabeledBatch
from jaxlm.data.batch import BatchSpec, Columns, random_tokens, token_columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.config import DataConfig
from jaxlm.data.examples import ContiguousExamples
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.documents import LabeledFormat
from jaxlm.reading.choices import choice


@choice(DataConfig, "labeled")
class LabeledConfig(DataConfig):
    """Sequences with a label for each token, one record in each, for `objective.type: custom`. What is beyond
    `model.seq_len` is cut off.
    """

    expects: ClassVar[str] = "labels"

    format: FormatConfig = field(default_factory=LabeledFormat)

    def batch_spec(self, seq_len: int) -> BatchSpec[LabeledBatch]:
        return BatchSpec(LabeledBatch, token_columns(Axis(POSITION, seq_len)))

    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> "LabeledExamples":
        return LabeledExamples(cache, seq_len)

    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        return random_tokens((num_examples, seq_len), vocab_size, seed)


class LabeledExamples(ContiguousExamples):
    """The examples of a token cache whose documents are tokens followed by as many labels."""

    def __init__(self, cache: TokenCache, seq_len: int):
        self.cache, self.seq_len = cache, seq_len
        starts, sizes = cache.offsets[:-1], np.diff(cache.offsets) // 2
        assert cache.target_mask is not None, "labels have a target mask"
        before = np.concatenate([[0], np.cumsum(cache.target_mask)])
        first, last = starts + sizes, starts + sizes + np.minimum(sizes, seq_len)
        has_labels = before[last] > before[first]
        self._num_cut = int((sizes > seq_len).sum())
        self._num_without = int((~has_labels).sum())
        self._starts, self._sizes = starts[has_labels], sizes[has_labels]

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def padding(self) -> float:
        return 1 - float(np.minimum(self._sizes, self.seq_len).sum()) / max(1, len(self) * self.seq_len)

    @property
    def summary(self) -> str:
        cut = f"; longer ones that were cut: {self._num_cut:,}" if self._num_cut else ""
        without = f"; left out, without labels before the cut: {self._num_without:,}" if self._num_without else ""
        return f"{len(self):,} sequences of {self.seq_len:,} tokens, {self.padding:.1%} padding{cut}{without}"

    def starts(self, indices: np.ndarray) -> np.ndarray:
        return self._starts[indices]

    def target_positions(self, indices: np.ndarray) -> np.ndarray:
        return (self._starts + self._sizes)[indices][:, None] + np.arange(self.seq_len)

    def read(self, indices: np.ndarray) -> Columns:
        """The columns of `LabeledBatch`, [len(indices), seq_len] each."""
        starts, sizes = self._starts[indices], self._sizes[indices]
        places = np.arange(self.seq_len, dtype=np.int32)
        inside = places < sizes[:, None]
        labels = starts + sizes
        return {
            "tokens": self.cache.read(starts, self.seq_len) * inside,
            "targets": self.cache.read(labels, self.seq_len) * inside,
            "loss_mask": (self.cache.read_target_mask(labels, self.seq_len) & inside).astype(np.float32),
            "segment_ids": inside.astype(np.int32),
            "positions": places * inside,
        }

    def show(self, index: int, tokenizer: Any) -> Iterator[str]:
        row = {name: column[0] for name, column in self.read(np.array([index])).items()}
        yield f"loss on {int(row['loss_mask'].sum())} of {self.seq_len} tokens"
        ids, is_target = row["tokens"][row["segment_ids"] > 0].tolist(), row["loss_mask"] > 0
        yield f"--- {self.cache.source_of(int(self._starts[index]))} ---\n{tokenizer.decode(ids, special=True)}"
        yield f"--- labels ---\n{tokenizer.decode(row['targets'][is_target].tolist(), special=True)}"
