"""Several sources as one endless stream of examples, in proportions that may change from step to step.

stage 0                               stage 1
| block 0 | block 1 | block 2 | blo   | block 0 | block 1 | ...
  a b a a   b a a a   a a b a   a b     b b a b   b a b b         each block holds each source exactly so often

Which source example i is from, and which of its windows, is a function of i: found in O(1), wherever a run goes on.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxlm.data.packing import PackedSequences
from jaxlm.data.shuffle import EraShuffle, Shuffle, permute, shuffle_in_eras, shuffle_indices

Columns = dict[str, np.ndarray]
_KEPT_BLOCKS = 64


@dataclass(frozen=True)
class MixtureStage:
    """A stretch of examples with fixed proportions.

    Attributes:
        start: its first example.
        counts: of each source in a block.
    """

    start: int
    counts: tuple[int, ...]


class Mixture:
    """Examples without end: each source's windows in an order of their own, epoch after epoch.

    Attributes:
        names: of the sources.
        seq_len: of every window.
    """

    def __init__(
        self, sources: Mapping[str, PackedSequences], stages: Sequence[MixtureStage], *, seed: int, shuffle: Shuffle
    ):
        """Args: stages: by their starts, the first at 0; each block as long as the sum of its counts."""
        self.names = tuple(sources)
        self.seq_len = next(iter(sources.values())).seq_len
        self._windows = tuple(sources.values())
        self._seed, self._shuffle = seed, shuffle
        # A source's order does not depend on which others there are.
        self._seeds = [seed if not name else _seed_of(f"{seed} {name}") for name in self.names]
        self._stages = tuple(stages)
        self._starts = np.array([stage.start for stage in stages], np.int64)
        self._blocks: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._before = self._counts_before()

    def read(self, examples: np.ndarray) -> Columns:
        """The columns of `TokenBatch` for some examples (int64, from 0), [len(examples), seq_len] each."""
        numbers, places = self.find(examples)
        if len(self._windows) == 1:
            return self._windows[0].read(places)
        columns: Columns = {}
        for number in np.unique(numbers):
            (rows,) = np.nonzero(numbers == number)
            for name, part in self._windows[number].read(places[rows]).items():
                if name not in columns:
                    columns[name] = np.empty((len(examples), self.seq_len), part.dtype)
                columns[name][rows] = part
        return columns

    def find(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64: the number of the source that each example is from, and which of its windows it is."""
        numbers, turns = self._turns(examples)
        places = np.empty_like(turns)
        for number in np.unique(numbers):
            mine = numbers == number
            places[mine] = self._places(int(number), turns[mine])
        return numbers, places

    def describe(self, examples: np.ndarray) -> str:
        """Their sources and windows, for people: `wiki: windows 3, 7 of 80; code: window 5 of 9`."""
        numbers, places = self.find(examples)
        parts = []
        for number in np.unique(numbers):
            mine = places[numbers == number].tolist()
            name = f"{self.names[number]}: " if self.names[number] else ""
            listed = f"window{'s' * (len(mine) > 1)} {', '.join(map(str, mine))}"
            parts.append(f"{name}{listed} of {len(self._windows[number])}")
        return "; ".join(parts)

    def windows(self, number: int) -> PackedSequences:
        """Of a source."""
        return self._windows[number]

    def exhausted_after(self) -> list[int | None]:
        """How many examples there are when each source has been read once; None for one that never is."""
        return [self._example_of_turn(number, len(windows)) for number, windows in enumerate(self._windows)]

    def _places(self, number: int, turns: np.ndarray) -> np.ndarray:
        size = len(self._windows[number])
        if isinstance(self._shuffle, EraShuffle):
            return shuffle_in_eras(turns, size, self._shuffle.era_length, seed=self._seeds[number])
        return shuffle_indices(turns, size, seed=self._seeds[number]) if self._shuffle else turns % size

    def _turns(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each example, and how many of that source's came before it."""
        if len(self._windows) == 1:
            return np.zeros_like(examples), examples
        numbers, turns = np.empty_like(examples), np.empty_like(examples)
        stages = np.searchsorted(self._starts, examples, side="right") - 1
        for stage in np.unique(stages):
            size = sum(self._stages[stage].counts)
            blocks, within = np.divmod(examples - self._starts[stage], size)
            for block in np.unique(blocks[stages == stage]):
                mine = (stages == stage) & (blocks == block)
                order, ranks = self._block(int(stage), int(block))
                numbers[mine] = order[within[mine]]
                counts = np.array(self._stages[stage].counts, np.int64)
                turns[mine] = (self._before[stage] + block * counts)[numbers[mine]] + ranks[within[mine]]
        return numbers, turns

    def _block(self, stage: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each place in a block, and how many of that source's places are before it."""
        found = self._blocks.get((stage, block))
        if found is None:
            if len(self._blocks) >= _KEPT_BLOCKS:
                # Batches are read in one thread, and may be described in another.
                self._blocks.pop(next(iter(self._blocks)), None)
            found = self._blocks[stage, block] = self._made_block(stage, block)
        return found

    def _made_block(self, stage: int, block: int) -> tuple[np.ndarray, np.ndarray]:
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
        """How many examples of each source come before each stage. Its last block may be cut off anywhere."""
        before = [np.zeros(len(self._windows), np.int64)]
        for number, (stage, following) in enumerate(zip(self._stages, self._stages[1:], strict=False)):
            blocks, rest = divmod(following.start - stage.start, sum(stage.counts))
            cut = np.bincount(self._block(number, blocks)[0][:rest], minlength=len(self._windows))
            before.append(before[-1] + blocks * np.array(stage.counts, np.int64) + cut)
        return before

    def _example_of_turn(self, number: int, turns: int) -> int | None:
        """How many examples the mixture has given when it has given so many of one source."""
        ends = [*(stage.start for stage in self._stages[1:]), None]
        for index, (stage, end) in enumerate(zip(self._stages, ends, strict=True)):
            wanted = turns - int(self._before[index][number])
            if not stage.counts[number] or (end is not None and turns > self._before[index + 1][number]):
                continue
            block, rank = divmod(wanted - 1, stage.counts[number])
            place = int(np.flatnonzero(self._block(index, block)[0] == number)[rank])
            return stage.start + block * sum(stage.counts) + place + 1
        return None


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
