"""Mixes several sources into one endless stream of examples, in the proportions of `data.train_weights`.

stage 0                               stage 1
| block 0 | block 1 | block 2 | blo   | block 0 | block 1 | ...
  a b a a   b a a a   a a b a   a b     b b a b   b a b b         fixed counts per source in each block

The source of example i, and its sequence in that source, are functions of i. Both are computed in O(1), so resuming is cheap
at any step.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.data.batch import Columns
from jaxlm.data.examples import Examples
from jaxlm.data.shuffle import EraShuffle, Shuffle, permute, shuffle_in_eras, shuffle_indices

_KEY = "data.train_weights"
Weights = Mapping[str, float]


@dataclass(frozen=True)
class WeightStage:
    """Weights that apply from a step on.

    Attributes:
        step: first step of the stage, counted from 0 within the phase.
        weights: source name -> weight; they need not sum to 1.
    """

    step: int
    weights: Weights


def weight_stages(weights: Any, names: Sequence[str]) -> list[WeightStage]:
    """Parses `train_weights`: a mapping, or a list of [step, mapping].

    Args:
        names: names of the sources with training data.

    Raises:
        ConfigError: the steps do not start at 0 or do not increase, a weight is negative, all weights of a stage are 0, a
            source is unknown, or a source has no weight in any stage.
    """
    entries = [[0, weights]] if isinstance(weights, Mapping) else weights
    stages = [_stage(entry, number, names) for number, entry in enumerate(entries)]
    steps = [stage.step for stage in stages]
    if not steps or steps[0] != 0 or any(a >= b for a, b in itertools.pairwise(steps)):
        raise ConfigError(
            f"{_KEY}: stages start at the steps {steps}; the first must start at 0, and each after the previous one"
        )
    missing = [name for name in names if not any(name in stage.weights for stage in stages)]
    if missing:
        raise ConfigError(f"{_KEY}: no weight for {', '.join(missing)}. Give a weight, or 0 to leave a source out")
    return stages


def _stage(entry: Any, number: int, names: Sequence[str]) -> WeightStage:
    if not (isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[1], Mapping)):
        raise ConfigError(f"{_KEY}.{number}: {entry} given; expected a pair like [1000, {{wiki: 0.5, code: 0.5}}]")
    step, weights = entry
    if isinstance(step, bool) or not isinstance(step, int):
        raise ConfigError(f"{_KEY}.{number}: {step!r} given as the first step of a stage; expected an integer")
    for name, weight in weights.items():
        if name not in names:
            raise ConfigError(f"{_KEY}: no source with train_urls is named '{name}'. Sources: {', '.join(names)}")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
            raise ConfigError(f"{_KEY}: {weight!r} given for '{name}'; expected a finite number, 0 or more")
    if not sum(weights.values()):
        raise ConfigError(f"{_KEY}: no source has a weight above 0 in the stage that starts at step {step}")
    return WeightStage(step, {name: float(weight) for name, weight in weights.items()})


def block_counts(weights: Weights, names: Sequence[str], block_size: int) -> tuple[int, ...]:
    """The number of examples of each source in a block, rounded by largest remainders (Hamilton's method).

    Raises:
        ConfigError: a source with a weight above 0 would get no examples.
    """
    total = sum(weights.values())
    shares = [weights.get(name, 0.0) / total * block_size for name in names]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(names)), key=lambda i: (counts[i] - shares[i], i))
    for index in by_remainder[: block_size - sum(counts)]:
        counts[index] += 1
    for name, share, count in zip(names, shares, counts, strict=True):
        if share and not count:
            raise ConfigError(
                f"{_KEY}: '{name}' has {share / block_size:.2g} of the total weight, less than one example in a block of"
                f" {block_size}. Raise data.mixture_block_size to {int(block_size / share) + 1}, or raise its weight"
            )
    return tuple(counts)


_CACHED_BLOCKS = 64
_CHUNK = 1 << 16  # examples that are located at a time


@dataclass(frozen=True)
class MixtureStage:
    """A range of examples with fixed proportions."""

    start: int  # first example of the stage
    counts: tuple[int, ...]  # examples per block, for each source


class Mixture:
    """An endless stream of examples. Each source's sequences have an order of their own, epoch after epoch."""

    def __init__(self, sources: Mapping[str, Examples], stages: Sequence[MixtureStage], *, seed: int, shuffle: Shuffle):
        """Args: stages: sorted by start, the first at 0. The block size of a stage is the sum of its counts."""
        self.names = tuple(sources)
        self._sources = tuple(sources.values())
        self._seed, self._shuffle = seed, shuffle
        # Seeded by name, so the order of a source does not depend on the other sources.
        self._seeds = [seed if not name else _seed_of(f"{seed} {name}") for name in self.names]
        self._stages = tuple(stages)
        self._starts = np.array([stage.start for stage in stages], np.int64)
        self._blocks: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._before = self._counts_before()

    def read(self, examples: np.ndarray) -> Columns:
        """The columns of some examples (int64, from 0), [len(examples), ...] each."""
        numbers, ranks, indices = self._located(examples)
        if len(self._sources) == 1:
            return self._drawn(0, indices, ranks, examples)
        columns: Columns = {}
        for number in np.unique(numbers):
            (rows,) = np.nonzero(numbers == number)
            for name, part in self._drawn(int(number), indices[rows], ranks[rows], examples[rows]).items():
                if name not in columns:
                    columns[name] = np.empty((len(examples), *part.shape[1:]), part.dtype)
                columns[name][rows] = part
        return columns

    def read_ahead(self, examples: np.ndarray) -> None:
        """Starts to download examples that will be read soon, if caches are at a URL."""
        if all(source.cache.blocks is None for source in self._sources):
            return
        numbers, indices = self.find(examples)
        for number in np.unique(numbers):
            self._sources[number].read_ahead(indices[numbers == number])

    def find(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64: the number of each example's source, and the index of its sequence in that source."""
        numbers, _, indices = self._located(examples)
        return numbers, indices

    def drawn(self, first: int, end: int) -> dict[str, np.ndarray]:
        """Source name -> int64, sorted: the indices of its sequences among the examples from `first` to before `end`. No
        source may be endless."""
        drawn = [np.zeros(len(source), bool) for source in self._sources]
        for start in range(first, end, _CHUNK):
            numbers, indices = self.find(np.arange(start, min(start + _CHUNK, end)))
            for number in np.unique(numbers):
                drawn[number][indices[numbers == number]] = True
            if all(one.all() for one in drawn):
                break
        return {name: np.flatnonzero(one) for name, one in zip(self.names, drawn, strict=True)}

    def describe(self, examples: np.ndarray) -> str:
        """Sources and sequences of examples, for logs: `wiki: sequences 3, 7 of 80; code: sequence 5 of 9`."""
        numbers, indices = self.find(examples)
        parts = []
        for number in np.unique(numbers):
            in_source = indices[numbers == number].tolist()
            name = f"{self.names[number]}: " if self.names[number] else ""
            listed = f"sequence{'s' * (len(in_source) > 1)} {', '.join(map(str, in_source))}"
            parts.append(f"{name}{listed} of {len(self._sources[number])}")
        return "; ".join(parts)

    def examples_of(self, number: int) -> Examples:
        """The examples of a source."""
        return self._sources[number]

    def exhausted_after(self) -> list[int | None]:
        """For each source, the number of mixture examples after which it has been read once; None if it never is."""
        return [self._examples_until(number, len(sequences)) for number, sequences in enumerate(self._sources)]

    def _drawn(self, number: int, indices: np.ndarray, ranks: np.ndarray, examples: np.ndarray) -> Columns:
        source = self._sources[number]
        return source.read_drawn(indices, ranks // len(source), examples)

    def _located(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64: the number of each example's source, how many of that source came before, and the index of its sequence."""
        numbers, ranks = self._source_ranks(examples)
        indices = np.empty_like(ranks)
        for number in np.unique(numbers):
            from_source = numbers == number
            indices[from_source] = self._sequence_indices(int(number), ranks[from_source])
        return numbers, ranks, indices

    def _sequence_indices(self, number: int, ranks: np.ndarray) -> np.ndarray:
        size = len(self._sources[number])
        if self._sources[number].is_endless and not self._shuffle:
            return ranks
        if isinstance(self._shuffle, EraShuffle):
            return shuffle_in_eras(ranks, size, self._shuffle.era_length, seed=self._seeds[number])
        return shuffle_indices(ranks, size, seed=self._seeds[number]) if self._shuffle else ranks % size

    def _source_ranks(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each example, and how many examples of that source came before it."""
        if len(self._sources) == 1:
            return np.zeros_like(examples), examples
        numbers, ranks = np.empty_like(examples), np.empty_like(examples)
        stages = np.searchsorted(self._starts, examples, side="right") - 1
        for stage in np.unique(stages):
            size = sum(self._stages[stage].counts)
            blocks, offsets = np.divmod(examples - self._starts[stage], size)
            for block in np.unique(blocks[stages == stage]):
                in_block = (stages == stage) & (blocks == block)
                order, block_ranks = self._block(int(stage), int(block))
                numbers[in_block] = order[offsets[in_block]]
                counts = np.array(self._stages[stage].counts, np.int64)
                ranks_before = self._before[stage] + block * counts
                ranks[in_block] = ranks_before[numbers[in_block]] + block_ranks[offsets[in_block]]
        return numbers, ranks

    def _block(self, stage: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position in a block, and how many positions of that source are before it in the block."""
        cached = self._blocks.get((stage, block))
        if cached is None:
            if len(self._blocks) >= _CACHED_BLOCKS:
                # The default avoids a race: batches are read in one thread and may be described in another.
                self._blocks.pop(next(iter(self._blocks)), None)
            cached = self._blocks[stage, block] = self._make_block(stage, block)
        return cached

    def _make_block(self, stage: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        counts = self._stages[stage].counts
        in_order = np.repeat(np.arange(len(counts)), counts)
        size = len(in_order)
        seed = _seed_of(f"{self._seed} stage {stage}")
        order = in_order[permute(np.arange(size), size, seed=seed, epoch=np.full(size, block))]
        ranks = np.empty(size, np.int64)
        for number, count in enumerate(counts):
            ranks[order == number] = np.arange(count)
        return order, ranks

    def _counts_before(self) -> list[np.ndarray]:
        """Counts the examples of each source before each stage. The last block of a stage may be incomplete."""
        before = [np.zeros(len(self._sources), np.int64)]
        for number, (stage, following) in enumerate(zip(self._stages, self._stages[1:], strict=False)):
            blocks, rest = divmod(following.start - stage.start, sum(stage.counts))
            in_last_block = np.bincount(self._block(number, blocks)[0][:rest], minlength=len(self._sources))
            before.append(before[-1] + blocks * np.array(stage.counts, np.int64) + in_last_block)
        return before

    def _examples_until(self, number: int, source_examples: int) -> int | None:
        """Returns how many examples of the mixture contain the first `source_examples` of a source; None if none do."""
        ends = [*(stage.start for stage in self._stages[1:]), None]
        for index, (stage, end) in enumerate(zip(self._stages, ends, strict=True)):
            in_stage = source_examples - int(self._before[index][number])
            if not stage.counts[number] or (end is not None and source_examples > self._before[index + 1][number]):
                continue
            block, rank = divmod(in_stage - 1, stage.counts[number])
            position = int(np.flatnonzero(self._block(index, block)[0] == number)[rank])
            return stage.start + block * sum(stage.counts) + position + 1
        return None


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
