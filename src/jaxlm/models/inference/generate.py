"""Text generation, for readers: it streams, answers tools, and drops the token that ends a text.

Tokens are copied to the host only when the caller needs them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.errors import ConfigError, check_at_least
from jaxlm.models.base import LanguageModel
from jaxlm.models.inference.cache import DecodingCache
from jaxlm.models.inference.decoding import (
    NO_TOKEN,
    DecodingState,
    Draw,
    Request,
    begin,
    compile_programs,
    seen_tokens,
    with_forced,
    write_until,
)
from jaxlm.models.inference.padding import left_padded, padded_length, program_rows
from jaxlm.models.inference.prefix_cache import PrefixCache
from jaxlm.models.inference.sampling import Sampling, StopFunction, row_keys
from jaxlm.models.inference.tools.calls import ToolCalls
from jaxlm.models.inference.unstacked import Generator

CacheDtype = Literal["float32", "bfloat16", "int8"]
CACHE_DTYPES: dict[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8}
"""Allowed dtypes of keys and values in the cache."""
_CHECK_EVERY = 16  # tokens between calls of a stop function on the host
_OF_KEYS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "cache_dtype")


@dataclass(frozen=True)
class GenerationConfig:
    """Options of generation.

    Attributes:
        max_new_tokens: maximum number of new tokens per prompt.
        temperature, top_k, top_p, min_p, repetition_penalty: see `Sampling`.
        seed: random seed, from 0 to 2**32 - 1. The tokens of a row depend only on the seed and the row's prompt, not on the
            other rows of the batch. Repeated prompts get different continuations.
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

    def __post_init__(self):
        if not 0 <= self.seed < 2**32:  # jax drops higher bits, and cannot take more than 64
            raise ConfigError(f"seed: {self.seed} given, an integer of 0 or more and at most {2**32 - 1} expected")

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
        vocab_size = model.Vocab.size
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
            check_fits(i, len(prompt), self.max_new_tokens, model.Pos.size)


def default_new_tokens(prompts: Sequence[Sequence[int]], seq_len: int) -> int:
    """Returns the number of tokens to generate if a user gives none: 128, or what fits after the longest prompt."""
    return max(1, min(128, seq_len - max(map(len, prompts), default=0)))


def how_to_fit(num_prompt_tokens: int, seq_len: int) -> str:
    """Says what to change if a prompt and the tokens after it are too long for a model, for messages."""
    room = seq_len - num_prompt_tokens
    return f"Shorten the prompt, or set max_new_tokens to at most {room}" if room > 0 else "Shorten the prompt"


def check_fits(number: int, num_prompt_tokens: int, num_new: int, seq_len: int) -> None:
    """Raises `ConfigError` if a prompt and its new tokens are too long for a model."""
    if num_prompt_tokens + num_new > seq_len:
        raise ConfigError(
            f"prompt {number} has {num_prompt_tokens} tokens. Together with max_new_tokens = {num_new} they exceed the"
            f" model's seq_len of {seq_len}. {how_to_fit(num_prompt_tokens, seq_len)}"
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
    request, cache = _request(generator.model, prompts, config, prefix_cache, tools)
    state = begin(generator, request, cache)
    if prefix_cache is not None:
        prefix_cache.remember(state.cache, len(prompts[0]))
    rows: list[list[int]] = [[] for _ in prompts]
    num_yielded = 0
    while num_yielded < num_new:
        end = min(num_new, num_yielded + (first if first is not None and not num_yielded else every))
        if prefix_cache is not None:
            prefix_cache.clear()
        state = write_until(generator, state, request.draw, end)
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


def compile_generation(
    generator: Generator, rows: int, prompt_tokens: int, config: GenerationConfig
) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """Compiles the programs of `generate_tokens`, and runs none: that of the prompts, and that of the other new tokens.

    Call it inside `layout.use()`, if there is one. Args: rows: number of prompts, which have `prompt_tokens` tokens each.
    """
    request, _ = _request(generator.model, [[0] * prompt_tokens] * rows, config, None, None)
    return compile_programs(generator, request)[:2]


def _request(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    prefix_cache: PrefixCache | None,
    tools: ToolCalls | None,
) -> tuple[Request, DecodingCache | None]:
    """What is to be continued, and a cache of the beginning of the prompts, if there is one."""
    num_rows = program_rows(len(prompts))
    capacity = padded_length(config.max_new_tokens)
    dtype = None if config.cache_dtype is None else CACHE_DTYPES[config.cache_dtype]
    cache, num_cached = None, 0
    if prefix_cache is not None:
        cache, num_cached = prefix_cache.lookup(model, prompts[0], num_rows, capacity, dtype)
    draw = Draw.of(row_keys(prompts, num_rows, config.seed), config.stop_ids, config.sampling.numbers)
    prompt = left_padded([prompt[num_cached:] for prompt in prompts], num_rows, num_cached)
    seen = seen_tokens(prompts, draw, model.Vocab.size)
    call_end = None if tools is None else jnp.int32(tools.tokens.call_end)
    return Request(prompt, draw, capacity, capacity, dtype, seen=seen, call_end=call_end), cache


def _with_outputs(state: DecodingState, rows: Sequence[Sequence[int]], tools: ToolCalls) -> DecodingState:
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
    return with_forced(state, forced)


def _until_end(tokens: np.ndarray, config: GenerationConfig) -> list[int]:
    row = tokens[tokens != NO_TOKEN].tolist()
    return row[:-1] if row and row[-1] in config.stop_ids and not config.with_stop else row
