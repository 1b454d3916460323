"""Text from a model: one pass over the prompts, then token by token with a cache.

The loop over tokens runs on the devices; the host looks in only as often as somebody wants to see something.
"""

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import current_layout
from jaxlm.models.base import Inputs, KVCache, LanguageModel
from jaxlm.models.inference.padding import left_padded, rounded_length, rounded_up
from jaxlm.models.inference.prefix_cache import PrefixCache
from jaxlm.models.inference.sampling import Sampling
from jaxlm.models.inference.unstacked import Generator

CACHE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8}
"""What the numbers in a cache may be."""
_STOPS_MULTIPLE = 4
_NO_TOKEN = -1
_LOOK_EVERY = 16  # tokens, where the host is to say when a row ends

StopFunction = Callable[[list[int]], bool]


@dataclass(frozen=True)
class GenerationConfig:
    """How prompts are continued.

    Attributes:
        max_new_tokens: for each prompt.
        temperature, top_k, top_p: see `Sampling`.
        seed: what a row draws depends on it and on the row's own prompt only, not on the rows beside it; a prompt that is
            given several times gets a different continuation each time.
        stop_ids: tokens that end a continuation, which is then without them.
        cache_dtype: of keys and values in the cache: a key of `CACHE_DTYPES`; None takes the parameters'.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    cache_dtype: str | None = None

    @property
    def sampling(self) -> Sampling:
        """How a token is drawn."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    def check(self, prompts: Sequence[Sequence[int]], model: LanguageModel) -> None:
        """Raises `ConfigError`: an empty prompt, an id beyond the vocabulary, or more tokens than the model's `Pos`."""
        vocab_size, seq_len = model.Vocab.size, model.Pos.size
        if self.max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens: {self.max_new_tokens} given, 0 or more expected")
        if self.cache_dtype is not None and self.cache_dtype not in CACHE_DTYPES:
            raise ConfigError(f"cache_dtype: '{self.cache_dtype}' given. Allowed: {', '.join(CACHE_DTYPES)}")
        if self.cache_dtype is not None and model.lm_head() is None:
            raise ConfigError(
                f"cache_dtype: '{self.cache_dtype}' given, but this model keeps no keys and values. Leave it out"
            )
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ConfigError(f"prompt {i} is empty: give it at least one token, for example the tokenizer's BOS")
            if not 0 <= min(prompt) <= max(prompt) < vocab_size:
                raise ConfigError(
                    f"prompt {i} has ids from {min(prompt)} to {max(prompt)}; the vocabulary has {vocab_size}"
                )
            if len(prompt) + self.max_new_tokens > seq_len:
                raise ConfigError(
                    f"prompt {i} has {len(prompt)} tokens, which with max_new_tokens = {self.max_new_tokens} exceed the"
                    f" model's seq_len of {seq_len}. Shorten the prompt or set max_new_tokens to at most"
                    f" {seq_len - len(prompt)}"
                )


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos_id: int | None = None,
) -> list[list[int]]:
    """Continues every prompt by up to `max_new_tokens` tokens, in the dtype of the model's parameters.

    Args:
        prompts: token ids, at least one a prompt.
        max_new_tokens, temperature, top_k, top_p, seed: see `GenerationConfig`.
        eos_id: the token that ends a continuation; None never ends one early.

    Returns:
        The new tokens of each prompt, without the prompt and without `eos_id`.

    Raises:
        ConfigError: see `GenerationConfig.check`.
    """
    stop_ids = () if eos_id is None else (eos_id,)
    return generate_tokens(
        Generator.of(model), prompts, GenerationConfig(max_new_tokens, temperature, top_k, top_p, seed, stop_ids)
    )


def generate_tokens(
    writer: Generator, prompts: Sequence[Sequence[int]], decoding: GenerationConfig, until: StopFunction | None = None
) -> list[list[int]]:
    """The new tokens of each prompt, without the token that ended it. Args: until: see `stream_tokens`."""
    rows: list[list[int]] = [[] for _ in prompts]
    every = decoding.max_new_tokens if until is None else _LOOK_EVERY
    for piece in stream_tokens(writer, prompts, decoding, every=every, until=until):
        for row, new in zip(rows, piece, strict=True):
            row += new
    return rows


def stream_tokens(
    writer: Generator,
    prompts: Sequence[Sequence[int]],
    decoding: GenerationConfig,
    *,
    every: int,
    until: StopFunction | None = None,
    prefix_cache: PrefixCache | None = None,
) -> Iterator[list[list[int]]]:
    """Yields the new tokens of each prompt, at most `every` at a time, until all rows have ended.

    Args:
        until: asked after each piece, with all new tokens of a row: true ends the row. Its last tokens may lie behind what
            was waited for.
        kept: for one prompt: what it holds of the prompt is not read again, and it holds the text afterwards.

    Raises:
        ConfigError: see `GenerationConfig.check`.
    """
    decoding.check(prompts, writer.model)
    num_new = decoding.max_new_tokens
    if not prompts or num_new == 0:
        return
    num_rows, room = rounded_up(len(prompts), _batch_multiple()), rounded_length(num_new)
    cache, num_held = (
        (None, 0) if prefix_cache is None else prefix_cache.lookup(writer.model, prompts[0], num_rows, room)
    )
    inputs = left_padded([prompt[num_held:] for prompt in prompts], num_rows, num_held)
    keys = _row_keys(prompts, num_rows, decoding.seed)
    stops = jnp.asarray(_padded(decoding.stop_ids), jnp.int32)
    sampling = decoding.sampling
    dtype = None if decoding.cache_dtype is None else CACHE_DTYPES[decoding.cache_dtype]
    state = _begin(writer.model, inputs, cache, keys, stops, sampling, room, dtype)
    state = writer.in_step_layout(state)
    rows: list[list[int]] = [[] for _ in prompts]
    seen = 0
    while seen < num_new:
        upto = min(num_new, seen + every)
        if prefix_cache is not None:
            prefix_cache.clear()
        state = _advance(writer.step_model, state, keys, stops, jnp.int32(upto), sampling)
        if prefix_cache is not None:
            prefix_cache.put(state.cache, [*prompts[0], *_fed(state)])
        shown = np.asarray(state.written)[: len(prompts), seen:upto]
        piece = [row[row != _NO_TOKEN].tolist() for row in shown]
        yield piece
        seen = upto
        alive = np.array(state.alive)
        if until is not None:
            for number, (row, new) in enumerate(zip(rows, piece, strict=True)):
                row += new
                alive[number] &= not until(row)
            state = eqx.tree_at(lambda s: s.alive, state, jax.device_put(alive, state.alive.sharding))
        if not alive.any():
            return


def _padded(stop_ids: Sequence[int]) -> list[int]:
    """To one of few lengths."""
    return [*stop_ids, *[_NO_TOKEN] * (rounded_up(max(1, len(stop_ids)), _STOPS_MULTIPLE) - len(stop_ids))]


def _batch_multiple() -> int:
    """Over how many devices the rows of a batch are spread."""
    layout = current_layout()
    return 1 if layout is None else layout.num_shards(BATCH)


def _row_keys(prompts: Sequence[Sequence[int]], rows: int, seed: int) -> jax.Array:
    """One key a row, made of the seed, the prompt, and how often that prompt has come before."""
    seen: Counter[int] = Counter()
    words = np.zeros((rows, 2), np.uint32)
    for row, prompt in enumerate(prompts):
        name = zlib.crc32(np.asarray(prompt, np.int32).tobytes())
        words[row] = name, seen[name]
        seen[name] += 1
    key = jax.random.key(seed)
    return jax.vmap(lambda w: jax.random.fold_in(jax.random.fold_in(key, w[0]), w[1]))(jnp.asarray(words))


class _State(eqx.Module):
    """What the loop carries. Row r has written `written[r, :step]`, and nothing from its end on; `token` is the last."""

    cache: Any
    token: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    alive: jax.Array
    written: jax.Array
    step: jax.Array


def _write(state: _State, cache: Any, token: jax.Array, stops: jax.Array) -> _State:
    alive = state.alive & (token[:, None] != stops).all(axis=1)
    prefix_cache = jnp.where(alive, token, _NO_TOKEN)[:, None]
    written = jax.lax.dynamic_update_slice_in_dim(state.written, prefix_cache, state.step, axis=1)
    return _State(cache, token, state.positions + 1, state.segment_ids, alive, written, state.step + 1)


def _choose(model: LanguageModel, final: NamedArray, keys: jax.Array, step: jax.Array, sampling: Sampling) -> jax.Array:
    logits = model.logits(final[POSITION, -1]).rearrange((BATCH, model.Vocab)).array
    return sampling.draw(logits.astype(jnp.float32), jax.vmap(jax.random.fold_in, (0, None))(keys, step))


def _fed(state: _State) -> list[int]:
    """What the first row has written and read again: all but the newest token, which its cache does not hold yet."""
    return np.asarray(state.written)[0, : int(state.step) - 1].tolist()


@functools.partial(jax.jit, static_argnums=(5, 6, 7), donate_argnums=2)
def _begin(
    model: LanguageModel,
    prompt: Inputs,
    cache: KVCache | None,
    keys: jax.Array,
    stops: jax.Array,
    sampling: Sampling,
    room: int,
    dtype: Any,
) -> _State:
    """Reads the prompts and writes the first token of each; `room` is for how many there is place.

    Args:
        cache: what comes before the prompts, if anything does.
        dtype: of a cache that is made here; None takes the parameters'.
    """
    prompt = hax.auto_sharded(prompt)
    Batch, Width = prompt.tokens.resolve_axis(BATCH), prompt.tokens.resolve_axis(POSITION)
    dtype = (
        next(leaf.dtype for leaf in jax.tree.leaves(model) if eqx.is_inexact_array(leaf)) if dtype is None else dtype
    )
    if cache is None:
        cache = model.init_cache(Batch, Width.size + room, dtype)
    first = model.hidden(prompt, cache=cache)
    segment_ids = prompt.segment_ids[POSITION, -1].array
    state = _State(
        first.cache,
        token=jnp.zeros(Batch.size, jnp.int32),
        positions=prompt.positions[POSITION, -1].array,
        segment_ids=segment_ids,
        alive=segment_ids != 0,
        written=jnp.full((Batch.size, room), _NO_TOKEN),
        step=jnp.int32(0),
    )
    token = _choose(model, first.final, keys, state.step, sampling)
    return _seen_by_all(_write(state, first.cache, token, stops))


@functools.partial(jax.jit, static_argnums=5, donate_argnums=1)
def _advance(
    model: LanguageModel, state: _State, keys: jax.Array, stops: jax.Array, upto: jax.Array, sampling: Sampling
) -> _State:
    """Writes tokens until there are `upto`, or all rows have ended."""
    (rows,) = state.token.shape
    axes = (Axis(BATCH, rows), Axis(POSITION, 1))

    def one(state: _State) -> _State:
        columns = (state.token, state.positions, state.segment_ids)
        inputs = Inputs(*(hax.named(c[:, None], axes) for c in columns))
        hidden = model.hidden(inputs, cache=state.cache)
        return _write(state, hidden.cache, _choose(model, hidden.final, keys, state.step, sampling), stops)

    return _seen_by_all(jax.lax.while_loop(lambda s: (s.step < upto) & s.alive.any(), one, state))


def _seen_by_all(state: _State) -> _State:
    """Every process reads every row."""
    layout = current_layout()
    if layout is None:
        return state
    shown = jax.lax.with_sharding_constraint((state.written, state.alive), layout.replicated())
    return eqx.tree_at(lambda s: (s.written, s.alive), state, shown)
