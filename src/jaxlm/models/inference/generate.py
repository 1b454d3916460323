"""Text generation: one prefill pass over the prompts, then token by token with a KV cache.

The loop over tokens runs on the devices. The host reads tokens back only as often as the caller needs them.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.errors import ConfigError, check_at_least
from jaxlm.core.sharding import replicated
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.inference.cache import DecodingCache
from jaxlm.models.inference.length_switch import next_inputs, rows_that_cross, step_across
from jaxlm.models.inference.padding import left_padded, padded_length, program_rows, round_up
from jaxlm.models.inference.prefix_cache import PrefixCache
from jaxlm.models.inference.sampling import Sampling, StopFunction, TokenDistribution, row_keys, with_token
from jaxlm.models.inference.tools.calls import ToolCalls
from jaxlm.models.inference.unstacked import Generator, unstack
from jaxlm.models.layers import activation_dtype

T = TypeVar("T")
CacheDtype = Literal["float32", "bfloat16", "int8"]
CACHE_DTYPES: dict[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8}
"""Allowed dtypes of keys and values in the cache."""
_STOP_IDS_MULTIPLE = 4
_NO_TOKEN = -1
_CHECK_EVERY = 16  # tokens between calls of a stop function on the host
_OF_KEYS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "cache_dtype")


@dataclass(frozen=True)
class GenerationConfig:
    """Options of generation.

    Attributes:
        max_new_tokens: maximum number of new tokens per prompt.
        temperature, top_k, top_p, min_p, repetition_penalty: see `Sampling`.
        seed: random seed. The tokens of a row depend only on the seed and the row's prompt, not on the other rows of
            the batch. Repeated prompts get different continuations.
        stop_ids: tokens that end a continuation. They are not part of the output, unless `with_stop`.
        cache_dtype: dtype of keys and values in the cache, a key of `CACHE_DTYPES`. None uses the dtype of the
            activations.
        with_stop: whether the token that ended a continuation is part of the output.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    cache_dtype: str | None = None
    with_stop: bool = False
    min_p: float | None = None
    repetition_penalty: float = 1.0

    @staticmethod
    def of(keys: Any, **others: Any) -> "GenerationConfig":
        """Takes the options from a section of the configuration or a command line, which have the same names."""
        return GenerationConfig(**{name: getattr(keys, name) for name in _OF_KEYS}, **others)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)

    def check(self, prompts: Sequence[Sequence[int]], model: LanguageModel) -> None:
        """Raises `ConfigError` for an empty prompt, a token id outside the vocabulary, too many tokens, or a model whose
        tokens attend to later ones."""
        if not model.is_causal:
            raise ConfigError(
                "tokens of this model attend to later ones (model.use_bidirectional_attention), so it cannot generate token"
                " by token with a KV cache. `jaxlm sample` and evals: type samples fill in masks instead"
            )
        vocab_size, seq_len = model.Vocab.size, model.Pos.size
        check_at_least("max_new_tokens", self.max_new_tokens, 0)
        if self.cache_dtype is not None and self.cache_dtype not in CACHE_DTYPES:
            raise ConfigError(f"cache_dtype: '{self.cache_dtype}' given. Allowed: {', '.join(CACHE_DTYPES)}")
        if self.cache_dtype is not None and model.lm_head() is None:
            raise ConfigError(f"cache_dtype: '{self.cache_dtype}' given, but this model has no KV cache. Remove it")
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ConfigError(f"prompt {i} is empty. Give it at least one token, for example the tokenizer's BOS")
            if not 0 <= min(prompt) <= max(prompt) < vocab_size:
                raise ConfigError(
                    f"prompt {i} has token ids from {min(prompt)} to {max(prompt)}, but the vocabulary has {vocab_size}"
                    " tokens"
                )
            if len(prompt) + self.max_new_tokens > seq_len:
                raise ConfigError(
                    f"prompt {i} has {len(prompt)} tokens. Together with max_new_tokens = {self.max_new_tokens} they"
                    f" exceed the model's seq_len of {seq_len}. {how_to_fit(len(prompt), seq_len)}"
                )


def default_new_tokens(prompts: Sequence[Sequence[int]], seq_len: int) -> int:
    """Returns the number of tokens to generate if a user gives none: 128, or what fits after the longest prompt."""
    return max(1, min(128, seq_len - max(map(len, prompts), default=0)))


def how_to_fit(num_prompt_tokens: int, seq_len: int) -> str:
    """Says what to change if a prompt and the tokens after it are too long for a model, for messages."""
    room = seq_len - num_prompt_tokens
    return f"Shorten the prompt, or set max_new_tokens to at most {room}" if room > 0 else "Shorten the prompt"


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
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
) -> list[list[int]]:
    """Continues each prompt by up to `max_new_tokens` tokens, in the dtype of the model's parameters.

    Args:
        prompts: token ids, at least one per prompt.
        max_new_tokens, temperature, top_k, top_p, seed, min_p, repetition_penalty: see `GenerationConfig`.
        eos_id: token that ends a continuation. None always generates `max_new_tokens` tokens.

    Returns:
        The new tokens of each prompt, without the prompt and without `eos_id`.

    Raises:
        ConfigError: see `GenerationConfig.check`.
    """
    stop_ids = () if eos_id is None else (eos_id,)
    others: Any = {"stop_ids": stop_ids, "min_p": min_p, "repetition_penalty": repetition_penalty}
    config = GenerationConfig(max_new_tokens, temperature, top_k, top_p, seed, **others)
    return generate_tokens(Generator.of(model), prompts, config)


def generate_tokens(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    until: StopFunction | None = None,
    tools: ToolCalls | None = None,
) -> list[list[int]]:
    """Generates the new tokens of each prompt, without the token that ended it (unless `with_stop`).

    Args:
        until, tools: see `stream_tokens`.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    every = config.max_new_tokens if until is None else _CHECK_EVERY
    for piece in stream_tokens(generator, prompts, config, every=every, until=until, tools=tools):
        for row, new in zip(rows, piece, strict=True):
            row += new
    return rows


def stream_tokens(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    every: int,
    first: int | None = None,
    until: StopFunction | None = None,
    prefix_cache: PrefixCache | None = None,
    tools: ToolCalls | None = None,
) -> Iterator[list[list[int]]]:
    """Yields the new tokens of each prompt, at most `every` at a time, until all rows have ended.

    Args:
        first: most tokens of the first piece; None means `every`. With 1, the first piece comes right after the prefill.
        until: called after each piece with all new tokens of a row; true ends the row. The row may contain more tokens
            than the one that met the condition, up to the end of the piece.
        prefix_cache: for a single prompt. The part of the prompt in this cache is not prefilled again, and the cache
            holds prompt and continuation afterwards.
        tools: answers the calls in new tokens. After a call, the row continues with the tool's output, which counts as new
            tokens. A piece ends where a row ends a call.

    Raises:
        ConfigError: see `GenerationConfig.check`.
    """
    config.check(prompts, generator.model)
    num_new = config.max_new_tokens
    if not prompts or num_new == 0:
        return
    distribution = config.sampling.numbers
    keys, stop_ids, state = _begin(generator, prompts, config, distribution, prefix_cache, tools)
    if prefix_cache is not None:
        prefix_cache.remember(state.cache, len(prompts[0]))
    rows: list[list[int]] = [[] for _ in prompts]
    num_yielded = 0
    while num_yielded < num_new:
        end = min(num_new, num_yielded + (first if first is not None and not num_yielded else every))
        if prefix_cache is not None:
            prefix_cache.clear()
        state = _decode_until(generator, state, keys, stop_ids, jnp.int32(end), distribution)
        if prefix_cache is not None:
            cached = np.asarray(state.written)[0, : int(state.step) - 1].tolist()  # all new tokens but the last
            prefix_cache.put(state.cache, [*prompts[0], *cached])
        end = min(end, int(state.step))  # a call may have ended, or all rows
        new_tokens = np.asarray(state.written)[: len(prompts), num_yielded:end]
        piece = [_until_end(row, config) for row in new_tokens]
        yield piece
        num_yielded = end
        alive = np.array(state.alive)
        for row, new in zip(rows, piece, strict=True):
            row += new
        if until is not None:
            for number, row in enumerate(rows):
                alive[number] &= not until(row)
            state = eqx.tree_at(lambda s: s.alive, state, jax.device_put(alive, state.alive.sharding))
        if not alive.any():
            return
        if tools is not None:
            state = _with_outputs(state, [row if alive[number] else [] for number, row in enumerate(rows)], tools)


def num_programs() -> int:
    """Counts the programs for generation that this process has compiled so far."""
    programs: Any = (_prefill, _decode, _cross)
    return sum(program._cache_size() for program in programs)


def compile_generation(
    generator: Generator, rows: int, prompt_tokens: int, config: GenerationConfig
) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """Compiles the programs of `generate_tokens`, and runs none: that of the prompts, and that of the other new tokens.

    Call it inside `layout.use()`, if there is one. Args: rows: number of prompts, which have `prompt_tokens` tokens each.
    """
    arguments = _prefill_arguments(generator, [[0] * prompt_tokens] * rows, config, config.sampling.numbers, None, None)
    lowered = _prefill.lower(generator.model, *arguments)
    prefill = lowered.compile()
    place = lambda info, sharding: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)  # noqa: E731
    state = jax.tree.map(place, lowered.out_info, prefill.output_shardings)
    if generator.step_model is not generator.model:
        state = jax.eval_shape(unstack, state)
    others = (arguments.keys, arguments.stop_ids, jnp.int32(config.max_new_tokens), config.sampling.numbers)
    return prefill, _decode.lower(generator.step_model, state, *others).compile()


def _begin(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    distribution: TokenDistribution,
    prefix_cache: PrefixCache | None,
    tools: ToolCalls | None,
) -> tuple[jax.Array, jax.Array, "_State"]:
    """Prefills the prompts. Returns the keys of the rows, the stop ids, and the state after the first new token."""
    arguments = _prefill_arguments(generator, prompts, config, distribution, prefix_cache, tools)
    state = _prefill(generator.model, *arguments)
    return arguments.keys, arguments.stop_ids, generator.in_step_layout(state)


class _PrefillArguments(NamedTuple):
    """Arguments of `_prefill` after the model."""

    prompt: Inputs
    cache: DecodingCache | None
    keys: jax.Array
    stop_ids: jax.Array
    distribution: TokenDistribution
    capacity: int
    dtype: Any
    call_end: jax.Array | None
    seen: np.ndarray | None


def _prefill_arguments(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    distribution: TokenDistribution,
    prefix_cache: PrefixCache | None,
    tools: ToolCalls | None,
) -> _PrefillArguments:
    num_rows = program_rows(len(prompts))
    capacity = padded_length(config.max_new_tokens)
    dtype = None if config.cache_dtype is None else CACHE_DTYPES[config.cache_dtype]
    cache, num_cached = None, 0
    if prefix_cache is not None:
        cache, num_cached = prefix_cache.lookup(generator.model, prompts[0], num_rows, capacity, dtype)
    return _PrefillArguments(
        left_padded([prompt[num_cached:] for prompt in prompts], num_rows, num_cached),
        cache,
        row_keys(prompts, num_rows, config.seed),
        jnp.asarray(_pad_stop_ids(config.stop_ids), jnp.int32),
        distribution,
        capacity,
        dtype,
        None if tools is None else jnp.int32(tools.tokens.call_end),
        _seen(prompts, num_rows, generator.model.Vocab.size) if distribution.reads_text else None,
    )


def _with_outputs(state: "_State", rows: Sequence[Sequence[int]], tools: ToolCalls) -> "_State":
    """Forces the outputs of the calls that end with the last token of a row into its next steps."""
    calls = state.calls
    assert calls is not None, "there is a tool"
    if not calls.has_ended:
        return state
    forced, step = np.array(calls.forced), int(state.step)
    for number, row in enumerate(rows):
        if row and row[-1] == tools.tokens.call_end:
            output = tools.output_after(row)[: forced.shape[1] - step]
            forced[number, step : step + len(output)] = output
    return dataclasses.replace(state, calls=_force(calls, forced))


def _until_end(tokens: np.ndarray, config: GenerationConfig) -> list[int]:
    row = tokens[tokens != _NO_TOKEN].tolist()
    return row[:-1] if row and row[-1] in config.stop_ids and not config.with_stop else row


def _pad_stop_ids(stop_ids: Sequence[int]) -> list[int]:
    """Pads to one of few lengths, so that few shapes are compiled."""
    return [*stop_ids, *[_NO_TOKEN] * (round_up(max(1, len(stop_ids)), _STOP_IDS_MULTIPLE) - len(stop_ids))]


def _seen(prompts: Sequence[Sequence[int]], rows: int, vocab_size: int) -> np.ndarray:
    """bool [rows, vocab]: whether a prompt has a token. On the host: part of a prompt may come from a prefix cache."""
    seen = np.zeros((rows, vocab_size), bool)
    for row, prompt in zip(seen, prompts, strict=False):
        row[np.asarray(prompt)] = True
    return seen


class _Calls(eqx.Module):
    """Holds what a tool answers.

    Attributes:
        forced: int32 [rows, capacity]; the token of each step, -1 where it is sampled.
        end: the token that ends a call.
        has_ended: bool, whether a row has ended a call. The host then has to read it before the next step.
    """

    forced: jax.Array
    end: jax.Array
    has_ended: jax.Array


class _State(eqx.Module):
    """Loop carry. Row r has generated `written[r, :step]`, which is -1 after the token that ended it. `token` is the last
    token. `seen`, bool [rows, vocab], is which tokens a text has so far; None if no option reads them."""

    cache: Any
    token: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    alive: jax.Array
    written: jax.Array
    step: jax.Array
    calls: _Calls | None = None
    seen: jax.Array | None = None


def _append(state: _State, cache: Any, token: jax.Array, stop_ids: jax.Array) -> _State:
    calls = state.calls
    if calls is not None:
        forced = jax.lax.dynamic_index_in_dim(calls.forced, state.step, axis=1, keepdims=False)
        token = jnp.where(forced == _NO_TOKEN, token, forced)
    alive = state.alive & (token[:, None] != stop_ids).all(axis=1)
    if calls is not None:
        calls = _Calls(calls.forced, calls.end, calls.has_ended | (alive & (token == calls.end)).any())
    column = jnp.where(state.alive, token, _NO_TOKEN)[:, None]
    written = jax.lax.dynamic_update_slice_in_dim(state.written, column, state.step, axis=1)
    seen = with_token(state.seen, token)
    return _State(cache, token, state.positions + 1, state.segment_ids, alive, written, state.step + 1, calls, seen)


def _sample(
    model: LanguageModel, final: NamedArray, keys: jax.Array, state: _State, distribution: TokenDistribution
) -> jax.Array:
    logits = model.logits(final[POSITION, -1]).rearrange((BATCH, model.Vocab)).array.astype(jnp.float32)
    keys_of_token = jax.vmap(jax.random.fold_in, (0, None))(keys, state.step)
    return distribution.draw(distribution.logits(logits, state.seen), keys_of_token)


@functools.partial(jax.jit, static_argnums=(6, 7), donate_argnums=2)
def _prefill(
    model: LanguageModel,
    prompt: Inputs,
    cache: DecodingCache | None,
    keys: jax.Array,
    stop_ids: jax.Array,
    distribution: TokenDistribution,
    capacity: int,
    dtype: Any,
    call_end: jax.Array | None = None,
    seen: jax.Array | None = None,
) -> _State:
    """Runs the model over the prompts and samples the first new token of each.

    Args:
        cache: holds the tokens before the prompts; None creates an empty cache.
        capacity: number of new tokens to reserve space for.
        dtype: of a new cache; None uses the dtype of the activations.
        call_end: the token that ends a call of a tool; None without tools.
        seen: see `_State`, for the whole prompts.
    """
    prompt = hax.auto_sharded(prompt)
    Batch, Width = prompt.tokens.resolve_axis(BATCH), prompt.tokens.resolve_axis(POSITION)
    if cache is None:
        if dtype is None:
            dtype = activation_dtype(model)
        cache = model.init_cache(Batch, Width.size + capacity, dtype)
    first = model.hidden(prompt, cache=cache)
    segment_ids = prompt.segment_ids[POSITION, -1].array
    nothing = jnp.full((Batch.size, capacity), _NO_TOKEN, jnp.int32)
    state = _State(
        first.cache,
        token=jnp.zeros(Batch.size, jnp.int32),
        positions=prompt.positions[POSITION, -1].array,
        segment_ids=segment_ids,
        alive=segment_ids != 0,
        written=nothing,
        step=jnp.int32(0),
        calls=None if call_end is None else _Calls(nothing, call_end, jnp.array(False)),
        seen=seen,
    )
    token = _sample(model, first.final, keys, state, distribution)
    return _replicate_outputs(_append(state, first.cache, token, stop_ids))


@functools.partial(jax.jit, donate_argnums=1)
def _decode(
    model: LanguageModel,
    state: _State,
    keys: jax.Array,
    stop_ids: jax.Array,
    end: jax.Array,
    distribution: TokenDistribution,
) -> _State:
    """Generates tokens until there are `end` per row, all rows have ended, or a text will grow beyond a switch length."""

    def one_token(state: _State) -> _State:
        hidden = model.hidden(next_inputs(state), cache=state.cache)
        return _append(state, hidden.cache, _sample(model, hidden.final, keys, state, distribution), stop_ids)

    def goes_on(state: _State) -> jax.Array:
        return _goes_on(state, end) & ~rows_that_cross(model, state).any()

    return _replicate_outputs(jax.lax.while_loop(goes_on, one_token, state))


def _decode_until(
    generator: Generator,
    state: _State,
    keys: jax.Array,
    stop_ids: jax.Array,
    end: jax.Array,
    distribution: TokenDistribution,
) -> _State:
    """`_decode`, and the steps at which texts grow beyond a switch length."""
    model, step_model = generator.model, generator.step_model
    state = _decode(step_model, state, keys, stop_ids, end, distribution)
    while model.traits.switch_lengths and _waits(model, state, end):
        state = _cross(model, step_model, state, keys, stop_ids, distribution)
        state = _decode(step_model, state, keys, stop_ids, end, distribution)
    return state


@jax.jit
def _cross(
    model: LanguageModel,
    step_model: Any,
    state: _State,
    keys: jax.Array,
    stop_ids: jax.Array,
    distribution: TokenDistribution,
) -> _State:
    """Generates one token per row, where the next token of some rows is the first beyond a switch length."""
    final, cache = step_across(model, step_model, state)
    return _replicate_outputs(_append(state, cache, _sample(step_model, final, keys, state, distribution), stop_ids))


@jax.jit
def _waits(model: LanguageModel, state: _State, end: jax.Array) -> jax.Array:
    return replicated(_goes_on(state, end) & rows_that_cross(model, state).any())


def _goes_on(state: _State, end: jax.Array) -> jax.Array:
    goes_on = (state.step < end) & state.alive.any()
    return goes_on if state.calls is None else goes_on & ~state.calls.has_ended


@jax.jit
def _force(calls: _Calls, forced: jax.Array) -> _Calls:
    # A jitted function, so that the next `_decode` sees arrays of the same kind and is not compiled again.
    return replicated(_Calls(forced, calls.end, jnp.zeros_like(calls.has_ended)))


def _replicate_outputs(state: _State) -> _State:
    """Replicates what the host reads, so that every process can read every row."""
    written, alive, step, calls = replicated((state.written, state.alive, state.step, state.calls))
    return dataclasses.replace(state, written=written, alive=alive, step=step, calls=calls)
