"""Training examples of one shape, read by index from a token cache, and shown as text."""

import abc
import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.data.batch import Columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.formats.base import TRUNCATION_TEXT, Truncation
from jaxlm.data.formats.segments import with_brackets


class Examples(abc.ABC):
    """Training examples of one shape, read by index from a token cache.

    Attributes:
        cache: where their tokens are.
        seq_len: tokens per sequence.
        arrangement: what determines their columns besides the tokens, the starts and `seq_len`, as plain JSON.
        is_endless: whether indices go on beyond the last example. Then `len` counts those of the first pass; those after
            it differ.
    """

    cache: TokenCache
    seq_len: int
    arrangement: Mapping[str, Any] = MappingProxyType({})
    is_endless: bool = False

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @property
    @abc.abstractmethod
    def padding(self) -> float:
        """The fraction of input positions that are padding."""

    @property
    @abc.abstractmethod
    def summary(self) -> str | None:
        """The way in which the documents became examples, for the log; None if there is nothing to say."""

    def degenerate_reason(self) -> str | None:
        """Says why nothing can be learned from any of the examples, and what to check; None if something can."""
        return None

    def num_evaluated(self, most: int | None) -> int:
        """Counts the examples that an evaluation of at most `most` reads; None for one pass."""
        if most is None:
            return len(self)
        return most if self.is_endless else min(most, len(self))

    def num_apart_from(self, first: int) -> int:
        """The number of examples from the beginning, at most `first`, that have no target of those from `first` on."""
        return first

    @abc.abstractmethod
    def starts(self, indices: np.ndarray) -> np.ndarray:
        """int64: the index in the cache of each example's first token."""

    @abc.abstractmethod
    def target_positions(self, indices: np.ndarray) -> np.ndarray:
        """int64 [len(indices), seq_len]: the index in the cache of each target of the examples' first sequence."""

    @abc.abstractmethod
    def read_ahead(self, indices: np.ndarray) -> None:
        """Starts to download examples that will be read soon, if the cache is at a URL."""

    @abc.abstractmethod
    def read(self, indices: np.ndarray) -> Columns:
        """The columns of some examples, [len(indices), ...] each.

        Raises:
            DamagedError: a token id is outside the vocabulary.
        """

    def read_drawn(self, indices: np.ndarray, epochs: np.ndarray, numbers: np.ndarray) -> Columns:
        """The columns of some examples as a training stream draws them.

        Args:
            epochs: int64 [examples], how often each was drawn before.
            numbers: int64 [examples], how many examples of all sources were drawn before each.
        """
        return self.read(indices)

    @abc.abstractmethod
    def show(self, index: int, tokenizer: Any) -> Iterator[str]:
        """An example as text; the first line says on how many tokens loss is computed.

        Text in ⟦brackets⟧ is masked: no loss is computed on its tokens.
        """


class ContiguousExamples(Examples):
    """Examples whose first sequence is a range of tokens of the cache."""

    def target_positions(self, indices: np.ndarray) -> np.ndarray:
        return self.starts(indices)[:, None] + np.arange(1, self.seq_len + 1)

    def read_ahead(self, indices: np.ndarray) -> None:
        if self.cache.blocks is not None:
            self.cache.blocks.read_ahead(self.starts(indices), self.seq_len + 1)


class WrappedExamples(Examples):
    """Wraps other examples. Subclasses change what is read from them, or which of them an index stands for."""

    def __init__(self, examples: Examples):
        self.cache, self.seq_len, self.arrangement = examples.cache, examples.seq_len, examples.arrangement
        self._examples = examples

    def _of(self, indices: np.ndarray) -> np.ndarray:
        """The indices of the wrapped examples."""
        return indices

    def __len__(self) -> int:
        return len(self._examples)

    @property
    def padding(self) -> float:
        return self._examples.padding

    @property
    def summary(self) -> str | None:
        return self._examples.summary

    def degenerate_reason(self) -> str | None:
        return self._examples.degenerate_reason()

    def num_apart_from(self, first: int) -> int:
        return self._examples.num_apart_from(first)

    def starts(self, indices: np.ndarray) -> np.ndarray:
        return self._examples.starts(self._of(indices))

    def target_positions(self, indices: np.ndarray) -> np.ndarray:
        return self._examples.target_positions(self._of(indices))

    def read_ahead(self, indices: np.ndarray) -> None:
        self._examples.read_ahead(self._of(indices))

    def read(self, indices: np.ndarray) -> Columns:
        return self._examples.read(self._of(indices))

    def show(self, index: int, tokenizer: Any) -> Iterator[str]:
        return self._examples.show(int(self._of(np.array(index))), tokenizer)


class ExampleRange(WrappedExamples):
    """A range of consecutive examples of others."""

    def __init__(self, examples: Examples, start: int, stop: int):
        super().__init__(examples)
        self._range = range(start, stop)

    def __len__(self) -> int:
        return len(self._range)

    def _of(self, indices: np.ndarray) -> np.ndarray:
        return indices + self._range.start

    def read_drawn(self, indices: np.ndarray, epochs: np.ndarray, numbers: np.ndarray) -> Columns:
        return self._examples.read_drawn(self._of(indices), epochs, numbers)


def no_targets_within(cache: TokenCache, seq_len: int, key: str, split: str, truncation: Truncation) -> str:
    """The error message if the sequences of a source have no target token. Args: key: of the source."""
    end, is_target = int(cache.offsets[1]), cache.read_target_mask(np.zeros(1, np.int64), int(cache.offsets[1]))[0]
    first = int(np.argmax(is_target)) + 1
    begins = f"begins at token {first:,}" if is_target.any() else "is on no token"
    why = (
        ""
        if truncation == "keep_start"
        else f" and longer documents {TRUNCATION_TEXT[truncation].happens} (format.truncation)"
    )
    return (
        f"{key}: no document of the {split} text has a token to compute the loss on within model.seq_len ({seq_len}){why}."
        f" The first, {cache.source_of(0)}, has {end:,} tokens, and the loss {begins}. Set {key}.{split}_urls to other text,"
        " or raise model.seq_len"
    )


def check_signals(train: Mapping[str, Examples]) -> None:
    """Raises `ConfigError` if an objective that compares the sequences of an example can learn nothing from any source.

    Args:
        train: by the names of the sources.
    """
    signals = {name: examples.degenerate_reason() for name, examples in train.items()}
    if signals and all(signals.values()):
        name, problem = next(iter(signals.items()))
        raise ConfigError(f"data{f'.configs.{name}' if name else ''}: {problem}")


def documents_as_text(row: Columns, tokenizer: Any) -> Iterator[tuple[int, str]]:
    """The start position and the text of each document in a sequence.

    Args:
        row: the columns of `TokenBatch`, [seq_len] each.
    """
    # The row's tokens, followed by its last target. A token is a target if the loss mask is set one position earlier.
    ids = np.append(row["tokens"], row["targets"][-1])
    is_target = np.append(False, row["loss_mask"] > 0)
    segments = np.append(row["segment_ids"], row["segment_ids"][-1] * is_target[-1])
    for segment in range(1, int(segments.max()) + 1):
        (positions,) = np.nonzero(segments == segment)
        runs = itertools.groupby(positions.tolist(), key=lambda position: bool(is_target[position]))
        texts = ((target, tokenizer.decode(ids[list(run)].tolist(), special=True)) for target, run in runs)
        yield int(positions[0]), with_brackets(texts)


def split_off(examples: Examples, num_held_out: int, key: str) -> tuple[Examples, Examples]:
    """The examples to train on, and the last ones, which are held out. Args: key: of the source."""
    available = len(examples)
    if not num_held_out:
        return examples, ExampleRange(examples, available, available)
    first = max(available - num_held_out, 0)
    num_trained = examples.num_apart_from(first)
    if not num_trained:
        overlap = f", of which {first:,} overlap these (data.stride)" if first else ""
        raise ConfigError(
            f"data.num_validation_sequences: {num_held_out} given, but {key} has only {available:,} sequences of"
            f" {examples.seq_len} tokens{overlap}. Give fewer, so that some are left to train on"
        )
    return ExampleRange(examples, 0, num_trained), ExampleRange(examples, first, available)
