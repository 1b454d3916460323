"""Divides the layers of a body into segments that repeat a pattern, so that few layers are compiled."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Turn = tuple[int, Any]
"""The number of a layer's stack, and its kind."""


@dataclass(frozen=True)
class Segment:
    """Consecutive layers that repeat a pattern, which run as one scan over its repetitions.

    Attributes:
        start: number of the first layer.
        turns: the layers of one repetition.
        repeats: how often they repeat.
    """

    start: int
    turns: tuple[Turn, ...]
    repeats: int

    @property
    def stop(self) -> int:
        """One more than the number of the last layer."""
        return self.start + len(self.turns) * self.repeats


def segments(turns: Sequence[Turn], start: int = 0) -> list[Segment]:
    """Divides layers into segments such that as few layers as possible are compiled, in as few segments as possible, of which
    the first ones are the longest.

    Layers of several stacks are in one segment only if they repeat: the backward pass can end between two segments, at
    layers that are frozen.

    Args:
        turns: of the layers.
        start: number of the first layer.
    """
    kinds = list(dict.fromkeys(kind for _, kind in turns))
    return [
        Segment(start + first, tuple(turns[first : first + period]), repeats)
        for first, period, repeats in _divided(tuple((stack, kinds.index(kind)) for stack, kind in turns))
    ]


def shortest_period(kinds: Sequence[T]) -> tuple[T, ...]:
    """The shortest prefix of `kinds` that repeats to give all of them. The last repetition may be partial."""
    return next(
        tuple(kinds[:period])
        for period in range(1, len(kinds) + 1)
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds))
    )


@functools.lru_cache
def _divided(layers: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """(first layer, period, repeats) of each segment, by dynamic programming from the last layer to the first."""
    best: dict[int, tuple[int, int, tuple]] = {len(layers): (0, 0, ())}
    for first in reversed(range(len(layers))):
        candidates = []
        for period in range(1, len(layers) - first + 1):
            pattern, repeats, stop = layers[first : first + period], 0, first
            takes_turns = len({stack for stack, _ in pattern}) > 1
            while layers[stop : stop + period] == pattern:
                repeats, stop = repeats + 1, stop + period
                if repeats > 1 or not takes_turns:
                    compiled, count, rest = best[stop]
                    candidates.append((compiled + period, count + 1, ((first, period, repeats), *rest)))
        best[first] = min(candidates, key=lambda candidate: (*candidate[:2], -math.prod(candidate[2][0][1:])))
    return best[0][2]
