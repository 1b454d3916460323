"""Documents that wait for a place in a row, found by their lengths, and the rows that they are packed into."""

import heapq
import itertools
import math
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from jaxlm.data.cache.row_index import RowIndex

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
    num_cuts = num_lost = 0
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
                    num_cuts, num_lost = num_cuts + 1, num_lost + whole - room
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
        num_lost += waiting.capacity - room  # a single token has no target
        del starts[firsts[-1] :], lengths[firsts[-1] :]
        if not waiting.count:
            break
    pieces = np.array(starts, np.int64), np.array(lengths, np.int32)
    return RowIndex(np.array(firsts, np.int64), *pieces, num_cuts, num_lost)
