"""Prefix cache: keeps the KV cache of one conversation between calls.

The longest common prefix of the prompt and the cached tokens is reused. The remaining tokens are prefilled without
padding: their number is rounded up to one of few lengths by recomputing some of the cached tokens, so the cache has no
gaps however often the text grows. A prompt that differs from the cached tokens early on (a chat template may rewrite
earlier turns) reuses less of the cache, or nothing.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp

from jaxlm.core.axes import BATCH, KEY_POSITION
from jaxlm.core.tree import is_named
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.inference.cache import DecodingCache, UnstackedCache
from jaxlm.models.inference.padding import left_padded, padded_length, round_up
from jaxlm.models.inference.unstacked import stack
from jaxlm.models.mixers.slots import grown_slots

_PREFILL_CHUNK = 512
"""Tokens to prefill at once with a cache; their scores against all slots are in memory together."""


class PrefixCache:
    """The KV cache of one text and its tokens, for one model and one cache dtype. Slot `start + i` holds token i."""

    def __init__(self) -> None:
        self._cache: DecodingCache | UnstackedCache | None = None
        self._tokens: list[int] = []
        self._start = 0

    def put(self, cache: Any, tokens: Sequence[int]) -> None:
        """Stores a cache whose first row holds exactly these tokens. Ignores other types of caches (of Flax modules).

        Call `clear` before you write to the cache again.
        """
        if isinstance(cache, DecodingCache | UnstackedCache):
            self._cache, self._tokens, self._start = cache, list(tokens), int(cache.length) - len(tokens)

    def clear(self) -> None:
        self._cache = None

    def lookup(
        self, model: LanguageModel, prompt: Sequence[int], rows: int, capacity: int
    ) -> tuple[DecodingCache | None, int]:
        """Returns a cache that holds a prefix of the prompt and the number of its tokens; (None, 0) if it saves nothing.

        The cache is removed from this object, because the caller may write to it.

        Args:
            rows: batch size; the prompt is the first row.
            capacity: slots needed after the prompt.
        """
        cache, self._cache = self._cache, None
        if cache is None or cache.positions.axis_size(BATCH) != rows:
            return None, 0
        common_prefix = sum(takewhile(bool, map(operator.eq, self._tokens, prompt)))
        num_cached = _num_reused(common_prefix, len(prompt))
        longest = max(len(prompt), len(self._tokens))
        # A cache or a prompt beyond a length that changes all tokens does not fit either.
        if not num_cached or any(num_cached <= length < longest for length in model.traits.switch_lengths):
            return None, 0
        cache = _stack(cache) if isinstance(cache, UnstackedCache) else cache
        cache = _truncate(cache, jnp.int32(self._start + num_cached))
        end = self._start + len(prompt)
        if cache.positions.axis_size(KEY_POSITION) < end + capacity:
            cache = _grow(cache, padded_length(end) + capacity)
        while len(prompt) - num_cached > _PREFILL_CHUNK:
            chunk = left_padded([prompt[num_cached : num_cached + _PREFILL_CHUNK]], rows, num_cached)
            cache, num_cached = _prefill_chunk(model, cache, chunk), num_cached + _PREFILL_CHUNK
        return cache, num_cached


def _num_reused(common_prefix: int, num_prompt: int) -> int:
    """Number of cached tokens to reuse so that the rest has one of few lengths. The rest is at least one token."""
    rest = max(1, num_prompt - common_prefix)
    width = padded_length(rest) if rest <= _PREFILL_CHUNK else round_up(rest, _PREFILL_CHUNK)
    return max(0, num_prompt - width)


_stack = jax.jit(stack)


@functools.partial(jax.jit, donate_argnums=0)
def _truncate(cache: DecodingCache, length: jax.Array) -> DecodingCache:
    """Keeps the first `length` slots. The others get segment id 0, so their contents do not matter."""
    axes = cache.segment_ids.axes
    in_use = hax.arange(cache.segment_ids.resolve_axis(KEY_POSITION)) < length
    segment_ids = hax.where(in_use, cache.segment_ids, 0).rearrange(axes)
    return dataclasses.replace(cache, segment_ids=segment_ids, length=length)


@functools.partial(jax.jit, static_argnums=1)
def _grow(cache: DecodingCache, capacity: int) -> DecodingCache:
    grow = lambda leaf: grown_slots(leaf, capacity) if is_named(leaf) else leaf  # noqa: E731
    return jax.tree.map(grow, cache, is_leaf=is_named)


@functools.partial(jax.jit, donate_argnums=1)
def _prefill_chunk(model: LanguageModel, cache: DecodingCache, inputs: Inputs) -> DecodingCache:
    return model.hidden(hax.auto_sharded(inputs), cache=cache).cache
