"""Unpaired preferences: completions that are desirable or not, each beside the completion of another record."""

import hashlib
from dataclasses import field
from typing import ClassVar

import numpy as np
from haliax import Axis

from jaxlm.core.axes import POSITION
from jaxlm.core.values.batch_types import MISMATCHED, UnpairedBatch
from jaxlm.data.batch import BatchSpec, Column, Columns, random_tokens, shifted_columns, token_columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.config import DataConfig
from jaxlm.data.examples import WrappedExamples
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.unpaired_format import UnpairedFormat
from jaxlm.data.several_completions import SeveralCompletions, first_of
from jaxlm.reading.choices import choice

_PROMPTS_AT_ONCE = 10_000


@choice(DataConfig, "unpaired")
class UnpairedConfig(DataConfig):
    """Completions that are desirable or not. `model.seq_len` limits each prompt with its completion; longer ones are
    truncated at the end.
    """

    reads: ClassVar[str] = "unpaired"

    format: FormatConfig = field(default_factory=UnpairedFormat)

    def batch_spec(self, seq_len: int) -> BatchSpec[UnpairedBatch]:
        matched = token_columns(Axis(POSITION, seq_len))
        others = {MISMATCHED + name: column for name, column in matched.items()}
        return BatchSpec(UnpairedBatch.of, {**matched, **others, "labels": Column(np.float32, ())})

    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> "LabeledCompletions":
        del record_format
        return LabeledCompletions(SeveralCompletions(cache, seq_len, ("completion",), "completions"))

    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        matched, others = (random_tokens((num_examples, seq_len), vocab_size, seed + n) for n in (0, 1))
        labels = np.random.default_rng(seed).integers(0, 2, num_examples).astype(np.float32)
        return {**matched, **{MISMATCHED + name: column for name, column in others.items()}, "labels": labels}


class LabeledCompletions(WrappedExamples):
    """Completions with their labels, and each prompt with the completion of the next example that has another prompt.

    If the source has a single prompt, that is a completion of this prompt too.
    """

    def __init__(self, completions: SeveralCompletions):
        super().__init__(completions)
        assert completions.cache.numbers is not None, "completions have labels"
        self._labels = completions.cache.numbers[completions.documents, 0]
        label = "true" if self._labels.any() else "false"
        self._note = ""
        if len(self._labels) and not np.ptp(self._labels):
            place = first_of(completions, np.zeros(1, int))
            self._note = (
                f"all of them have the label {label} {place}: unless another source has the other, check label_field"
            )
        self._first_targets, self._ends = completions.first_targets[:, 0], completions.ends
        self._others = _next_with_another(self._prompt_digests())

    @property
    def summary(self) -> str | None:
        return "; ".join(filter(None, (super().summary, self._note)))

    def read(self, indices: np.ndarray) -> Columns:
        matched = {name: column[:, 0] for name, column in self._examples.read(indices).items()}
        others = {MISMATCHED + name: column for name, column in self._mismatched(indices).items()}
        return {**matched, **others, "labels": self._labels[indices]}

    def _prompt_digests(self) -> np.ndarray:
        """uint64 [examples]: equal for equal prompts."""
        digests = np.empty(len(self), np.uint64)
        for first in range(0, len(self), _PROMPTS_AT_ONCE):
            indices = np.arange(first, min(first + _PROMPTS_AT_ONCE, len(self)))
            starts = self.starts(indices)
            lengths = self._first_targets[indices] - starts
            prompts = np.split(self.cache.read_ranges(starts, lengths), np.cumsum(lengths)[:-1])
            for index, prompt in zip(indices, prompts, strict=True):
                digests[index] = int.from_bytes(hashlib.blake2b(prompt.tobytes(), digest_size=8).digest(), "little")
        return digests

    def _mismatched(self, indices: np.ndarray) -> Columns:
        others = self._others[indices]
        starts = np.stack([self.starts(indices), self._first_targets[others]], axis=1)
        room = self.seq_len + 1
        prompts = self._first_targets[indices] - starts[:, 0]
        completions = np.minimum(self._ends(others) - starts[:, 1], room - prompts)
        lengths = np.stack([prompts, completions], axis=1)
        flat = self.cache.read_ranges(starts.ravel(), lengths.ravel())
        sizes = prompts + completions
        at = np.arange(room, dtype=np.int32)
        inside = at < sizes[:, None]
        ids = np.zeros((len(indices), room), np.int32)
        ids[inside] = flat
        return shifted_columns(ids, inside, inside & (at >= prompts[:, None]))


def _next_with_another(keys: np.ndarray) -> np.ndarray:
    """For each position, the next one with another key, around the end; the next one if all keys are equal."""
    indices, size = np.arange(len(keys)), max(len(keys), 1)
    last_of_run = np.flatnonzero(keys != np.roll(keys, -1))
    if not last_of_run.size:
        return (indices + 1) % size
    return (last_of_run[np.searchsorted(last_of_run, indices) % last_of_run.size] + 1) % size
