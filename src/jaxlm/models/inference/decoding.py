"""The loop that writes tokens after prompts: one program reads the prompts, another writes token by token with a cache.

It runs on the devices. Readers of text (`generate`) stop it every few tokens, and training on responses (`responses`) at
the end. On one CPU device, the second program runs a model with unstacked layers (`unstacked`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, EMBED, POSITION, VOCAB
from jaxlm.core.products.matmul import arranged, einsum
from jaxlm.core.sharding import replicated
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.chunked_loss import soft_capped
from jaxlm.models.inference.cache import DecodingCache
from jaxlm.models.inference.length_switch import step_across
from jaxlm.models.inference.padding import round_up
from jaxlm.models.inference.sampling import TokenDistribution, log_likelihoods, with_token
from jaxlm.models.inference.unstacked import Generator, unstack
from jaxlm.models.layers import activation_dtype

XlaOptions = tuple[tuple[str, bool | int | str], ...]
NO_TOKEN = -1
_STOP_IDS_MULTIPLE = 4


class Draw(eqx.Module):
    """Says how the tokens of rows are drawn, and which of them end a row.

    Attributes:
        keys: one per row.
        stop_ids: int32, filled up with ids that no token has.
    """

    keys: jax.Array
    stop_ids: np.ndarray
    distribution: TokenDistribution

    @staticmethod
    def of(keys: jax.Array, stop_ids: Sequence[int], distribution: TokenDistribution) -> "Draw":
        """With one of few numbers of stop ids, so that few shapes are compiled."""
        padding = round_up(max(1, len(stop_ids)), _STOP_IDS_MULTIPLE) - len(stop_ids)
        return Draw(keys, np.array([*stop_ids, *[NO_TOKEN] * padding], np.int32), distribution)


class Request(eqx.Module):
    """What is to be continued.

    Attributes:
        prompt: padded on the left; without the tokens that a cache has.
        capacity: most new tokens of a row.
        slots: of a new cache, for the tokens after the prompts.
        cache_dtype: of a new cache; None uses the dtype of the activations.
        with_logps: the log-likelihoods of the tokens are wanted too, so logits are computed like those of the loss.
        seen: bool [rows, vocab], see `seen_tokens`.
        call_end: the token that ends a call of a tool; None without tools.
    """

    prompt: Inputs
    draw: Draw
    capacity: int = eqx.field(static=True)
    slots: int = eqx.field(static=True)
    cache_dtype: Any = eqx.field(static=True, default=None)
    with_logps: bool = eqx.field(static=True, default=False)
    seen: Any = None
    call_end: Any = None


def seen_tokens(prompts: Sequence[Sequence[int]], draw: Draw, vocab_size: int) -> np.ndarray | None:
    """bool [rows, vocab]: whether a prompt has a token; None if no option reads it. On the host: part of a prompt may come
    from a prefix cache."""
    if not draw.distribution.reads_text:
        return None
    seen = np.zeros((len(draw.keys), vocab_size), bool)
    for row, prompt in zip(seen, prompts, strict=False):
        row[np.asarray(prompt)] = True
    return seen


class Calls(eqx.Module):
    """Holds what a tool answers.

    Attributes:
        forced: int32 [rows, capacity]; the token of each step, -1 where it is sampled.
        end: the token that ends a call.
        has_ended: bool, whether a row has ended a call. The host then has to read it before the next step.
    """

    forced: jax.Array
    end: jax.Array
    has_ended: jax.Array


class DecodingState(eqx.Module):
    """Loop carry: each row has `step` new tokens, and `token` is the last one.

    Attributes:
        cache: of the tokens before `token`.
        positions, segment_ids: int32 [rows], of `token`.
        alive: bool [rows], whether the row goes on.
        written: int32 [rows, capacity], with the token that ended the row; -1 after it.
        calls: None without tools.
        seen: bool [rows, vocab], the tokens of each text so far; None if no option reads them.
        logps: float32 [rows, capacity], log-likelihood of each token under the distribution that it was drawn from, 0 after
            the end; None if they are not wanted.
    """

    cache: Any
    token: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    alive: jax.Array
    written: jax.Array
    step: jax.Array
    calls: Calls | None
    seen: jax.Array | None
    logps: jax.Array | None

    def next_inputs(self) -> Inputs:
        """The next token of each row."""
        axes = (Axis(BATCH, len(self.token)), Axis(POSITION, 1))
        return Inputs(*(hax.named(column[:, None], axes) for column in (self.token, self.positions, self.segment_ids)))

    def goes_on(self, end: jax.Array) -> jax.Array:
        """Tells whether another token is to be written before there are `end` per row."""
        goes_on = (self.step < end) & self.alive.any()
        return goes_on if self.calls is None else goes_on & ~self.calls.has_ended

    def crossing(self, model: LanguageModel) -> jax.Array:
        """Bool [rows], whether the next token is the first beyond a switch length."""
        lengths = jnp.asarray(model.traits.switch_lengths, jnp.int32)
        return self.alive & (self.positions[:, None] == lengths).any(axis=1)


def begin(
    generator: Generator, request: Request, cache: DecodingCache | None = None, xla_options: XlaOptions = ()
) -> DecodingState:
    """Reads the prompts and draws the first new token of each.

    Args:
        cache: holds the tokens before the prompts, and is overwritten; None creates one.
        xla_options: what the programs are compiled with.
    """
    return generator.in_step_layout(_programs(xla_options).begin(generator.model, request, cache))


def write_until(
    generator: Generator, state: DecodingState, draw: Draw, end: int, xla_options: XlaOptions = ()
) -> DecodingState:
    """Writes until there are `end` tokens per row, all rows have ended, or a row has ended a call. Overwrites the state."""
    programs, model, step_model, until = _programs(xla_options), generator.model, generator.step_model, jnp.int32(end)
    state = programs.write(step_model, state, draw, until)
    while model.traits.switch_lengths and _waits(model, state, until):
        state = programs.cross(model, step_model, state, draw)
        state = programs.write(step_model, state, draw, until)
    return state


def with_forced(state: DecodingState, forced: np.ndarray) -> DecodingState:
    """The state after the host has read the calls. Args: forced: see `Calls`."""
    return dataclasses.replace(state, calls=_force(state.calls, forced))


def compile_programs(
    generator: Generator, request: Request, xla_options: XlaOptions = ()
) -> tuple[jax.stages.Compiled, jax.stages.Compiled, DecodingState]:
    """The programs of `begin` and `write_until`, and the shapes and shardings of the state between them. Runs none."""
    programs = _programs(xla_options)
    lowered = programs.begin.lower(generator.model, request, None)
    first = lowered.compile()
    place = lambda info, sharding: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)  # noqa: E731
    state = jax.tree.map(place, lowered.out_info, first.output_shardings)
    if generator.step_model is not generator.model:
        state = jax.eval_shape(unstack, state)
    end = jax.ShapeDtypeStruct((), jnp.int32)
    others = programs.write.lower(generator.step_model, state, request.draw, end).compile()
    return first, others, state


def num_programs() -> int:
    """Counts the programs for generation without options that this process has compiled so far."""
    programs: Any = _programs(())
    return sum(program._cache_size() for program in programs)


class _Programs(NamedTuple):
    begin: jax.stages.Wrapped
    write: jax.stages.Wrapped
    cross: jax.stages.Wrapped


@functools.cache
def _programs(xla_options: XlaOptions) -> _Programs:
    """Once for each set of options: jax's caches know functions."""
    compiled = functools.partial(jax.jit, compiler_options=dict(xla_options) or None)
    return _Programs(compiled(_begin, donate_argnums=2), compiled(_write, donate_argnums=1), compiled(_cross))


def _begin(model: LanguageModel, request: Request, cache: DecodingCache | None) -> DecodingState:
    prompt = hax.auto_sharded(request.prompt)
    Batch, Width = prompt.tokens.resolve_axis(BATCH), prompt.tokens.resolve_axis(POSITION)
    if cache is None:
        dtype = activation_dtype(model) if request.cache_dtype is None else request.cache_dtype
        cache = model.init_cache(Batch, Width.size + request.slots, dtype)
    first = model.hidden(prompt, cache=cache)
    segment_ids = prompt.segment_ids[POSITION, -1].array
    nothing = jnp.full((Batch.size, request.capacity), NO_TOKEN, jnp.int32)
    state = DecodingState(
        first.cache,
        token=jnp.zeros(Batch.size, jnp.int32),
        positions=prompt.positions[POSITION, -1].array,
        segment_ids=segment_ids,
        alive=segment_ids != 0,
        written=nothing,
        step=jnp.int32(0),
        calls=None if request.call_end is None else Calls(nothing, request.call_end, jnp.array(False)),
        seen=request.seen,
        logps=jnp.zeros(nothing.shape, jnp.float32) if request.with_logps else None,
    )
    return _readable(_with_next(model, state, first.cache, first.final, request.draw))


def _write(model: LanguageModel, state: DecodingState, draw: Draw, end: jax.Array) -> DecodingState:
    """Also ends before a text grows beyond a switch length."""

    def one_token(state: DecodingState) -> DecodingState:
        hidden = model.hidden(state.next_inputs(), cache=state.cache)
        return _with_next(model, state, hidden.cache, hidden.final, draw)

    def goes_on(state: DecodingState) -> jax.Array:
        return state.goes_on(end) & ~state.crossing(model).any()

    return _readable(jax.lax.while_loop(goes_on, one_token, state))


def _cross(model: LanguageModel, step_model: Any, state: DecodingState, draw: Draw) -> DecodingState:
    """Writes one token per row, where the next token of some rows is the first beyond a switch length."""
    final, cache = step_across(model, step_model, state.next_inputs(), state.cache, state.crossing(model))
    return _readable(_with_next(step_model, state, cache, final, draw))


@jax.jit
def _waits(model: LanguageModel, state: DecodingState, end: jax.Array) -> jax.Array:
    """Tells whether `_write` ended before a switch length, on every process."""
    return replicated(state.goes_on(end) & state.crossing(model).any())


@jax.jit
def _force(calls: Calls, forced: jax.Array) -> Calls:
    # A jitted function, so that the next `_write` sees arrays of the same kind and is not compiled again.
    return replicated(Calls(forced, calls.end, jnp.zeros_like(calls.has_ended)))


def _readable(state: DecodingState) -> DecodingState:
    """Replicates what the host reads, so that every process can read every row."""
    names = ("written", "alive", "step", "calls", "logps")
    return dataclasses.replace(state, **replicated({name: getattr(state, name) for name in names}))


def _with_next(model: LanguageModel, state: DecodingState, cache: Any, final: NamedArray, draw: Draw) -> DecodingState:
    """The state with one more token of each row, drawn after the last of the hidden states."""
    last, calls, logps = final[POSITION, -1], state.calls, state.logps
    if logps is None:
        logits = model.logits(last).rearrange((BATCH, model.Vocab)).array.astype(jnp.float32)
    else:
        logits = _logits_of_loss(model, last)
    logits = draw.distribution.logits(logits, state.seen)
    token = draw.distribution.draw(logits, jax.vmap(jax.random.fold_in, (0, None))(draw.keys, state.step))

    def appended(rows: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(rows, new[:, None], state.step, axis=1)

    if logps is not None:
        logps = appended(logps, jnp.where(state.alive, log_likelihoods(logits, token), 0.0))
    if calls is not None:
        forced = jax.lax.dynamic_index_in_dim(calls.forced, state.step, axis=1, keepdims=False)
        token = jnp.where(forced == NO_TOKEN, token, forced)
    alive = state.alive & (token[:, None] != draw.stop_ids).all(axis=1)
    if calls is not None:
        calls = Calls(calls.forced, calls.end, calls.has_ended | (alive & (token == calls.end)).any())
    return DecodingState(
        cache,
        token,
        state.positions + 1,
        state.segment_ids,
        alive,
        appended(state.written, jnp.where(state.alive, token, NO_TOKEN)),
        state.step + 1,
        calls,
        with_token(state.seen, token),
        logps,
    )


def _logits_of_loss(model: LanguageModel, last: NamedArray) -> jax.Array:
    """float32 [rows, vocab], with products like those of the loss: `model.logits` would round them to the model's dtype."""
    head = model.lm_head()
    if head is None:
        logits = last.rearrange((BATCH, VOCAB)).array.astype(jnp.float32)
    else:
        logits = einsum("bd,vd->bv", last.rearrange((BATCH, EMBED)).array, arranged(head, (VOCAB, EMBED)), jnp.float32)
    return soft_capped(logits, model.traits.logit_soft_cap)
