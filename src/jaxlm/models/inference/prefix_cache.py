"""What is kept of one text from one continuation to the next, so that a longer one is not read from its beginning.

What a prompt begins with, and the cache holds, is not read again. The rest is read in lengths without padding, which are
made up by reading some of the held tokens again: so the cache has no gaps however often the text grows. A prompt that
begins otherwise than what is held (a chat template may write earlier turns anew) shares less of it, or nothing.
"""

import functools
import operator
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import BATCH, KEY_POSITION
from jaxlm.models.base import Inputs, KVArray, KVCache, LanguageModel
from jaxlm.models.inference.kv_cache import UnstackedCache
from jaxlm.models.inference.padding import left_padded, rounded_length, rounded_up
from jaxlm.models.inference.unstacked import stack

_PIECE = 512
"""Tokens that are read at once beside a cache: their scores with all of its slots are in memory together."""


class PrefixCache:
    """The cache of one text, and the tokens that it holds. Of one model, and one dtype of caches.

    Slot `start + i` holds token i.
    """

    def __init__(self) -> None:
        self._cache: KVCache | UnstackedCache | None = None
        self._tokens: list[int] = []
        self._start = 0

    def put(self, cache: Any, tokens: Sequence[int]) -> None:
        """Keeps a cache that holds these tokens of its first row, and nothing behind them; another kind of cache is not
        kept. Whoever goes on to write into it calls `forget` before."""
        if isinstance(cache, KVCache | UnstackedCache):
            self._cache, self._tokens, self._start = cache, list(tokens), int(cache.length) - len(tokens)

    def clear(self) -> None:
        """Keeps nothing."""
        self._cache = None

    def lookup(self, model: LanguageModel, prompt: Sequence[int], rows: int, room: int) -> tuple[KVCache | None, int]:
        """The cache with all but the end of a prompt in it, and how many tokens that is; (None, 0) where as much would be
        read as without it. It is not kept any longer: it belongs to the caller.

        Args:
            rows: of the batch, of which the prompt is the first.
            room: slots that are needed behind the prompt.
        """
        cache, self._cache = self._cache, None
        if cache is None or cache.positions.axis_size(BATCH) != rows:
            return None, 0
        num_held = _num_useful(self._num_same(prompt), len(prompt))
        if not num_held:
            return None, 0
        cache = _together(cache) if isinstance(cache, UnstackedCache) else cache
        cache = _cut(cache, jnp.int32(self._start + num_held))
        end = self._start + len(prompt)
        if cache.positions.axis_size(KEY_POSITION) < end + room:
            cache = _grown(cache, rounded_length(end) + room)
        while len(prompt) - num_held > _PIECE:
            piece = left_padded([prompt[num_held : num_held + _PIECE]], rows, num_held)
            cache, num_held = _read(model, cache, piece), num_held + _PIECE
        return cache, num_held

    def _num_same(self, prompt: Sequence[int]) -> int:
        """Tokens that a prompt and what is held begin with alike."""
        return sum(takewhile(bool, map(operator.eq, self._tokens, prompt)))


def _num_useful(num_same: int, num_asked: int) -> int:
    """Tokens to take from the cache, so that what is left to read has one of few lengths; at least one token is left."""
    unread = max(1, num_asked - num_same)
    width = rounded_length(unread) if unread <= _PIECE else rounded_up(unread, _PIECE)
    return max(0, num_asked - width)


_together = jax.jit(stack)


@functools.partial(jax.jit, donate_argnums=0)
def _cut(cache: KVCache, length: jax.Array) -> KVCache:
    """The cache with so many of its slots in use. Those behind them have segment 0, so it does not matter what is in them."""
    axes = cache.segment_ids.axes
    in_use = hax.arange(cache.segment_ids.resolve_axis(KEY_POSITION)) < length
    segment_ids = hax.where(in_use, cache.segment_ids, 0).rearrange(axes)
    return KVCache(cache.keys, cache.values, cache.positions, segment_ids, length)


@functools.partial(jax.jit, static_argnums=1)
def _grown(cache: KVCache, capacity: int) -> KVCache:
    """The cache with so many slots, of which the new ones hold nothing."""

    def grown(slots: NamedArray) -> NamedArray:
        axis = slots.resolve_axis(KEY_POSITION)
        widths = [(0, capacity - axis.size if own == axis else 0) for own in slots.axes]
        axes = tuple(axis.resize(capacity) if own == axis else own for own in slots.axes)
        return hax.auto_sharded(NamedArray(jnp.pad(slots.array, widths), axes))

    def column(one: KVArray) -> KVArray:
        return KVArray(grown(one.values), None if one.scale is None else grown(one.scale))

    slots = grown(cache.positions), grown(cache.segment_ids)
    return KVCache(column(cache.keys), column(cache.values), *slots, cache.length)


@functools.partial(jax.jit, donate_argnums=1)
def _read(model: LanguageModel, cache: KVCache, inputs: Inputs) -> KVCache:
    return model.hidden(hax.auto_sharded(inputs), cache=cache).cache
