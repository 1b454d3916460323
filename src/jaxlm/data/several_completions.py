"""Several completions of the same prompt, side by side: pairs, groups with rewards, and unpaired preferences."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any, ClassVar

import numpy as np
from haliax import Axis

from jaxlm.core.axes import GROUP, PAIR, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import MISMATCHED, GroupBatch, PairBatch, UnpairedBatch
from jaxlm.data.batch import BatchSpec, Column, Columns, random_tokens, shifted_columns, token_columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.config import DataConfig, check_formats
from jaxlm.data.examples import ContiguousExamples, WrappedExamples, documents_as_text
from jaxlm.data.formats.base import TRUNCATION_TEXT, FormatConfig, Truncation
from jaxlm.data.formats.completions import CompletionsFormat, GroupsFormat, PairsFormat, UnpairedFormat
from jaxlm.data.sources.named import truncations
from jaxlm.reading.choices import choice

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
        targets = np.flatnonzero(is_target)
        first_targets = targets[np.searchsorted(targets, starts)]
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
            parts.append(f"longer {what} that were {TRUNCATION_TEXT[self._truncation].done}: {self._num_long:,}")
        if self._num_without_targets:
            parts.append(
                f"{self._num_without_targets:,} {what} left out: their prompt leaves no room for a token of a completion"
                f" (the first: {self._without_targets[0]})"
            )
        return "; ".join(parts)

    def place(self, index: int) -> str:
        """Says where an example comes from, for messages."""
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

    def degenerate_reason(self) -> str | None:
        return f"all {self._equal}, {self._if_all}" if self._are_all_equal else None


def first_of(examples: SeveralCompletions, indices: np.ndarray) -> str:
    """The place of the first of some examples, for messages."""
    return f"(the first: {examples.place(int(indices[0]))})"


@choice(DataConfig, "pairs")
class PairsConfig(DataConfig):
    """Pairs of a chosen and a rejected completion of the same prompt. `model.seq_len` limits each half; `format.truncation`
    says what becomes of longer ones.
    """

    expects: ClassVar[str] = "pairs"

    format: FormatConfig = field(default_factory=PairsFormat)

    def batch_spec(self, seq_len: int) -> BatchSpec[PairBatch]:
        return BatchSpec(PairBatch.of, token_columns(Axis(PAIR, 2), Axis(POSITION, seq_len)))

    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> ComparedCompletions:
        pairs = SeveralCompletions(cache, seq_len, ("chosen", "rejected"), "pairs", record_format.overlong)
        return ComparedCompletions(
            pairs,
            pairs.with_equal_completions(),
            wording=("pairs have two equal completions", "they show no preference"),
            if_all="so nothing is preferred to anything. Check chosen_field and rejected_field of the format, and"
            " model.seq_len: what it cuts off is not compared",
        )

    def identity(self) -> dict[str, Any]:
        return super().identity() | truncations(self.corpus.sources)

    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        return random_tokens((num_examples, 2, seq_len), vocab_size, seed)


_PROMPTS_AT_ONCE = 10_000


@choice(DataConfig, "unpaired")
class UnpairedConfig(DataConfig):
    """Completions that are desirable or not. `model.seq_len` limits each prompt with its completion; longer ones are
    truncated at the end.
    """

    expects: ClassVar[str] = "unpaired"

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


@choice(DataConfig, "groups")
class GroupsConfig(DataConfig):
    """Groups of responses that a model has sampled for the same prompt, with their rewards. `model.seq_len` limits each
    prompt with a response; longer ones are truncated at the end.
    """

    expects: ClassVar[str] = "groups"

    format: FormatConfig = field(default_factory=GroupsFormat)

    def batch_spec(self, seq_len: int) -> BatchSpec[GroupBatch]:
        Group = Axis(GROUP, self._group_size())
        rewards = {"rewards": Column(np.float32, (Group,))}
        return BatchSpec(GroupBatch.of, rewards | token_columns(Group, Axis(POSITION, seq_len)))

    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> "RewardedGroups":
        del record_format
        names = [f"response {number + 1}" for number in range(self._group_size())]
        return RewardedGroups(SeveralCompletions(cache, seq_len, names, "groups"))

    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        shape = (num_examples, self._group_size())
        rewards = np.random.default_rng(seed).integers(0, 2, shape).astype(np.float32)
        return {"rewards": rewards, **random_tokens((*shape, seq_len), vocab_size, seed)}

    def check_keys(self) -> None:
        self._group_size()

    def _group_size(self) -> int:
        formats = [source.config.format for source in self.corpus.sources]
        sizes = {config.num_completions for config in formats if isinstance(config, CompletionsFormat)}
        if len(sizes) != 1:
            check_formats(self)
            given = " and ".join(map(str, sorted(sizes))) or "an unknown number of"
            raise ConfigError(
                f"data.configs: groups of {given} responses given, but all sources must have the same format.group_size"
            )
        return sizes.pop()


class RewardedGroups(ComparedCompletions):
    """Groups with the rewards of their responses."""

    def __init__(self, groups: SeveralCompletions):
        assert groups.cache.numbers is not None, "groups have rewards"
        self._rewards = groups.cache.numbers[groups.documents]
        super().__init__(
            groups,
            np.flatnonzero(np.ptp(self._rewards, axis=1) == 0),
            wording=("groups have equal rewards", "none of their responses is better than the others"),
            if_all="so no response is better than another. Check rewards_field of the format, and the function that"
            " computed the rewards",
        )

    def read(self, indices: np.ndarray) -> Columns:
        return {"rewards": self._rewards[indices], **self._examples.read(indices)}
