"""Documents that wait for a place in a row, found by their lengths."""

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Iterable

import numpy as np


class WaitingDocuments:
    """Documents, or their rests, by length. Of several of the same length, the one that came first goes first."""

    def __init__(self, capacity: int):
        self.count = 0
        self._capacity = capacity
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
        if length > self._capacity:
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
