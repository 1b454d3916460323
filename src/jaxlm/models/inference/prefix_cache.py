"""Prefix cache: keeps the decoding cache of one conversation between calls.

The longest common prefix of the prompt and the cached tokens is reused. The remaining tokens are prefilled without
padding: their number is rounded up to one of few lengths by recomputing some of the cached tokens, so the cache has no
gaps however often the text grows. A prompt that differs from the cached tokens early on (a chat template may rewrite
earlier turns) reuses less of the cache, or nothing.

A state, as recurrent layers keep it, cannot be taken back to an earlier token. Of a model with such layers, the prefix up
to a snapshot is reused: of the end of each turn, and of every 512 tokens of a prompt. The remaining tokens are then padded
on the left, which leaves gaps in the cache of the other layers.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, KEY_POSITION
from jaxlm.core.tree import is_named
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.inference.cache import DecodingCache, UnstackedCache, has_state
from jaxlm.models.inference.padding import left_padded, padded_length, round_up
from jaxlm.models.inference.unstacked import stack
from jaxlm.models.layers import activation_dtype
from jaxlm.models.mixers.slots import grown_slots

_PREFILL_CHUNK = 512
"""Tokens to prefill at once with a cache; their scores against all slots are in memory together."""
_SNAPSHOT_BYTES = 2**30
"""Of all snapshots of a text. The oldest are dropped."""


@dataclass(frozen=True)
class Snapshot:
    """The states after some of the tokens of a text.

    Attributes:
        length: slots of the cache that were in use.
        states: as `DecodingCache.stacks`, with None for arrays with slots.
    """

    length: int
    states: Any

    @property
    def num_bytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(array.nbytes for array in jax.tree.leaves(self.states))


class PrefixCache:
    """The decoding cache of one text and its tokens, for one model and one cache dtype.

    Without snapshots, slot `start + i` holds token i.
    """

    def __init__(self) -> None:
        self._cache: DecodingCache | UnstackedCache | None = None
        self._tokens: list[int] = []
        self._start = 0
        self._snapshots: dict[int, Snapshot] = {}  # by number of tokens

    def put(self, cache: Any, tokens: Sequence[int]) -> None:
        """Stores a cache whose first row holds exactly these tokens. Ignores other types of caches (of Flax modules).

        Call `clear` before you write to the cache again.
        """
        if isinstance(cache, DecodingCache | UnstackedCache):
            self._cache, self._tokens, self._start = cache, list(tokens), int(cache.length) - len(tokens)

    def clear(self) -> None:
        self._cache = None

    def remember(self, cache: Any, num_tokens: int) -> None:
        """Takes a snapshot of a cache of this many tokens, with which what `put` stores next begins. Without states, does
        nothing."""
        if isinstance(cache, DecodingCache | UnstackedCache) and has_state(cache):
            self._snapshots[num_tokens] = Snapshot(int(cache.length), _states(cache))
            while sum(one.num_bytes for one in self._snapshots.values()) > _SNAPSHOT_BYTES:
                del self._snapshots[next(iter(self._snapshots))]

    def lookup(
        self, model: LanguageModel, prompt: Sequence[int], rows: int, capacity: int, dtype: Any = None
    ) -> tuple[DecodingCache | None, int]:
        """Returns a cache that holds a prefix of the prompt and the number of its tokens; (None, 0) if it saves nothing.

        The cache is removed from this object, because the caller may write to it.

        Args:
            rows: batch size; the prompt is the first row.
            capacity: slots needed after the prompt.
            dtype: of a new cache; None uses the dtype of the activations.
        """
        cache, self._cache = self._cache, None
        if cache is not None and cache.positions.axis_size(BATCH) != rows:
            cache = None
        num_cached, length, states = (0, 0, None) if cache is None else self._reusable(cache, prompt)
        longest = max(len(prompt), len(self._tokens))
        # A cache or a prompt beyond a length that changes all tokens does not fit either.
        if cache is None or any(num_cached <= switch < longest for switch in model.traits.switch_lengths):
            num_cached = 0
        self._snapshots = {num: one for num, one in self._snapshots.items() if num <= num_cached}
        if cache is not None and num_cached:
            cache = _stack(cache) if isinstance(cache, UnstackedCache) else cache
            cache = _truncate(cache, jnp.int32(length), states)
        elif len(prompt) > _PREFILL_CHUNK and _keeps_states(model):
            length = 0
            cache = _empty(model, rows, padded_length(len(prompt)) + capacity, dtype or activation_dtype(model))
        else:
            return None, 0
        num_rest = len(prompt) - num_cached
        num_last = (num_rest - 1) % _PREFILL_CHUNK + 1
        end = length + num_rest - num_last + padded_length(num_last)
        if cache.positions.axis_size(KEY_POSITION) < end + capacity:
            cache = _grow(cache, padded_length(end) + capacity)
        while len(prompt) - num_cached > _PREFILL_CHUNK:
            chunk = left_padded([prompt[num_cached : num_cached + _PREFILL_CHUNK]], rows, num_cached)
            cache, num_cached = _prefill_chunk(model, cache, chunk), num_cached + _PREFILL_CHUNK
            self.remember(cache, num_cached)
        return cache, num_cached

    def _reusable(self, cache: DecodingCache | UnstackedCache, prompt: Sequence[int]) -> tuple[int, int, Any]:
        """The number of tokens that the prompt can reuse, their slots, and the states after them."""
        common_prefix = sum(takewhile(bool, map(operator.eq, self._tokens, prompt)))
        if not has_state(cache):
            num_cached = _num_reused(common_prefix, len(prompt))
            return num_cached, self._start + num_cached, None
        if common_prefix == len(self._tokens):
            self.remember(cache, common_prefix)
        usable = [num for num in self._snapshots if num <= min(common_prefix, len(prompt) - 1)]
        if not usable:
            return 0, 0, None
        found = self._snapshots[max(usable)]
        return max(usable), found.length, found.states


def _num_reused(common_prefix: int, num_prompt: int) -> int:
    """Number of cached tokens to reuse so that the rest has one of few lengths. The rest is at least one token."""
    rest = max(1, num_prompt - common_prefix)
    width = padded_length(rest) if rest <= _PREFILL_CHUNK else round_up(rest, _PREFILL_CHUNK)
    return max(0, num_prompt - width)


_stack = jax.jit(stack)


def _keeps_states(model: LanguageModel) -> bool:
    cache = jax.eval_shape(lambda model: model.init_cache(Axis(BATCH, 1), 1, jnp.float32), model)
    return isinstance(cache, DecodingCache) and has_state(cache)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _empty(model: LanguageModel, rows: int, capacity: int, dtype: Any) -> DecodingCache:
    return model.init_cache(Axis(BATCH, rows), capacity, dtype)


@jax.jit
def _states(cache: DecodingCache | UnstackedCache) -> Any:
    """A copy of the arrays without slots, in stacks; None for the others."""
    whole = stack(cache) if isinstance(cache, UnstackedCache) else cache
    state = lambda leaf: None if leaf.has_axis(KEY_POSITION) else _copied(leaf)  # noqa: E731
    return jax.tree.map(state, whole.stacks, is_leaf=is_named)


def _copied(leaf: NamedArray) -> NamedArray:
    """A program returns an argument as it is otherwise, and another program may write to it."""
    return NamedArray(jnp.copy(leaf.array), leaf.axes)


@functools.partial(jax.jit, donate_argnums=0)
def _truncate(cache: DecodingCache, length: jax.Array, states: Any) -> DecodingCache:
    """Keeps the first `length` slots. The others get segment id 0, so their contents do not matter.

    Args:
        states: after these tokens (`_states`); None if the cache has none.
    """
    axes = cache.segment_ids.axes
    in_use = hax.arange(cache.segment_ids.resolve_axis(KEY_POSITION)) < length
    segment_ids = hax.where(in_use, cache.segment_ids, 0).rearrange(axes)
    cache = dataclasses.replace(cache, segment_ids=segment_ids, length=length)
    if states is None:
        return cache
    is_leaf = lambda node: node is None or is_named(node)  # noqa: E731
    restored = lambda state, leaf: leaf if state is None else _copied(state)  # noqa: E731
    return dataclasses.replace(cache, stacks=jax.tree.map(restored, states, cache.stacks, is_leaf=is_leaf))


@functools.partial(jax.jit, static_argnums=1)
def _grow(cache: DecodingCache, capacity: int) -> DecodingCache:
    grow = lambda leaf: grown_slots(leaf, capacity) if is_named(leaf) else leaf  # noqa: E731
    return jax.tree.map(grow, cache, is_leaf=is_named)


@functools.partial(jax.jit, donate_argnums=1)
def _prefill_chunk(model: LanguageModel, cache: DecodingCache, inputs: Inputs) -> DecodingCache:
    return model.hidden(hax.auto_sharded(inputs), cache=cache).cache
