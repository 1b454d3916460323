"""Samples responses with the log-likelihood of each token, for training on them.

`jaxlm.models.inference.generate` serves readers of text: it streams, answers tools, and drops the token that ends a text.
Here all tokens count, the last one too, and so do the probabilities that they were sampled with.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, EMBED, POSITION, VOCAB
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.matmul import arranged, einsum
from jaxlm.core.sharding import current_layout, replicated
from jaxlm.core.tracing import used_arguments
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.chunked_loss import soft_capped
from jaxlm.models.inference.length_switch import next_inputs, rows_that_cross, step_across
from jaxlm.models.inference.padding import left_padded, padded_length, program_rows
from jaxlm.models.inference.sampling import Sampling, TokenDistribution, with_token
from jaxlm.models.inference.unstacked import Generator
from jaxlm.models.layers import activation_dtype
from jaxlm.models.linear import Linear

XlaOptions = tuple[tuple[str, bool | int | str], ...]
_NO_TOKEN = -1


def check_samples_as_trained(model: LanguageModel) -> None:
    """Raises `ConfigError` if a training step computes other probabilities than a sampler does with the same weights."""
    axes = (Axis(BATCH, 1), Axis(POSITION, model.Pos.size))
    column: Any = NamedArray(jax.ShapeDtypeStruct((1, model.Pos.size), jnp.int32), axes)  # type: ignore[arg-type]
    key = jax.eval_shape(lambda: jax.random.key(0))
    read_key, *_ = used_arguments(
        lambda key, model, inputs: model.hidden(inputs, key=key).final, key, model, Inputs(column, column, column)
    )
    fp8 = [path for path, layer in tree.modules_by_path(model, Linear) if layer.fp8 is not None]
    differences = {
        f"{''.join(fp8[:1])} multiplies in fp8 (surgery fp8). Remove the surgery": fp8,
        "it is random (dropout). Set the dropout of the model and of its adapters to 0": read_key,
    }
    for difference, applies in differences.items():
        if applies:
            raise ConfigError(
                "data.type: rollouts samples from the model without what it does in training only, so that the ratios of the"
                f" objective would compare two models. In training, {difference}"
            )


class Noise(NamedTuple):
    """Holds what the random numbers of each row depend on: these numbers, the row's number, and the position of the token.

    Attributes:
        seed: of the run.
        step: number of the step that the responses are for.
        turn: number of earlier responses of the same rows.
    """

    seed: int
    step: int
    turn: int = 0


class Responses(NamedTuple):
    """Sampled tokens, one row per prompt, on the host of every process.

    Attributes:
        tokens: int32 [rows, max_new_tokens], with the token that ended the row; -1 after it.
        logps: float32 [rows, max_new_tokens], log-likelihood of each token under the distribution that it was sampled from; 0
            after the end.
    """

    tokens: np.ndarray
    logps: np.ndarray


def sample_responses(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    noise: Noise,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Sequence[int],
    num_rows: int | None = None,
    xla_options: XlaOptions = (),
) -> Responses:
    """Continues each prompt until a stop token or `max_new_tokens`, all rows at once.

    Call it inside `layout.use()`, on all processes with the same arguments. The prompts and new tokens must fit into the
    model's `seq_len`.

    Args:
        rows: the number of each prompt's row. A row's tokens depend on it, and not on the other rows of the call.
        sampling: with a temperature above 0.
        num_rows: rows of the program, at least as many as prompts; None has as many. Equal numbers compile once.
        xla_options: what the programs are compiled with.
    """
    begin, finish, cross = _programs(xla_options)
    num_rows = program_rows(num_rows or len(prompts))
    numbers = np.zeros(num_rows, np.uint32)
    numbers[: len(rows)] = rows
    words = np.array([noise.seed, noise.step, noise.turn], np.uint32)
    stops = np.array([*stop_ids, _NO_TOKEN], np.int32)  # never empty; no token has this id
    inputs = left_padded(prompts, num_rows)
    distribution = sampling.numbers
    state, keys = begin(generator.model, inputs, numbers, words, stops, distribution, max_new_tokens)
    state = generator.in_step_layout(state)
    state = finish(generator.step_model, state, keys, stops, distribution)
    while generator.model.traits.switch_lengths and _waits(generator.model, state):
        state = cross(generator.model, generator.step_model, state, keys, stops, distribution)
        state = finish(generator.step_model, state, keys, stops, distribution)
    return Responses(np.asarray(state.tokens)[: len(prompts)], np.asarray(state.logps)[: len(prompts)])


class SamplingPrograms(NamedTuple):
    """The compiled programs of `sample_responses`.

    Attributes:
        prompts: reads the prompts and samples the first token of each.
        tokens: samples the other tokens, in a loop.
        cache: shapes, dtypes and shardings of the keys and values.
    """

    prompts: jax.stages.Compiled
    tokens: jax.stages.Compiled
    cache: Any


def compile_sampling(
    model: LanguageModel,
    num_rows: int,
    prompt_tokens: int,
    max_new_tokens: int,
    sampling: Sampling,
    xla_options: XlaOptions = (),
) -> SamplingPrograms:
    """Compiles the programs of `sample_responses` for a number of rows and a length of prompts, from shapes alone. Layers are
    stacked, as on all devices except a single CPU.

    Call it inside `layout.use()`. Args: model: shapes, dtypes and shardings.
    """
    num_rows, width, layout = program_rows(num_rows), padded_length(prompt_tokens), current_layout()
    shape: Any = jax.ShapeDtypeStruct
    tokens = shape((num_rows, width), jnp.int32, sharding=None if layout is None else layout.replicated())
    column = NamedArray(tokens, (Axis(BATCH, num_rows), Axis(POSITION, width)))
    numbers, words, stops = shape((num_rows,), jnp.uint32), shape((3,), jnp.uint32), shape((2,), jnp.int32)
    distribution = jax.tree.map(lambda number: shape((), number.dtype), sampling.numbers)
    begin, finish, _ = _programs(xla_options)
    lowered = begin.lower(model, Inputs(column, column, column), numbers, words, stops, distribution, max_new_tokens)
    prompts = lowered.compile()
    place = lambda info, sharding: shape(info.shape, info.dtype, sharding=sharding)  # noqa: E731
    state, keys = jax.tree.map(place, lowered.out_info, prompts.output_shardings)
    others = finish.lower(model, state, keys, stops, distribution).compile()
    return SamplingPrograms(prompts, others, state.cache.stacks)


class _State(eqx.Module):
    """Loop carry: `step` tokens of each row have been sampled, `token` is the last one.

    Attributes:
        cache: of the tokens before `token`.
        positions, segment_ids: int32 [rows], of `token`.
        alive: bool [rows], whether the row goes on.
        tokens, logps: as of `Responses`.
        seen: bool [rows, vocab], the tokens of each prompt and response so far; None if no option reads them.
    """

    cache: Any
    token: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    alive: jax.Array
    tokens: jax.Array
    logps: jax.Array
    step: jax.Array
    seen: jax.Array | None


def _begin(
    model: LanguageModel,
    prompt: Inputs,
    numbers: jax.Array,
    words: jax.Array,
    stops: jax.Array,
    distribution: TokenDistribution,
    max_new_tokens: int,
) -> tuple[_State, jax.Array]:
    """Runs the model over the prompts and samples the first token of each. Also returns the keys of the rows."""
    key = jax.random.key(words[0])
    for word in (words[1], words[2]):
        key = jax.random.fold_in(key, word)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(numbers)
    prompt = hax.auto_sharded(prompt)
    Batch, Width = prompt.tokens.resolve_axis(BATCH), prompt.tokens.resolve_axis(POSITION)
    # The last token is not read again, so it needs no slot.
    cache = model.init_cache(Batch, Width.size + max_new_tokens - 1, activation_dtype(model))
    first = model.hidden(prompt, cache=cache)
    segment_ids = prompt.segment_ids[POSITION, -1].array
    state = _State(
        first.cache,
        token=jnp.zeros(Batch.size, jnp.int32),
        positions=prompt.positions[POSITION, -1].array,
        segment_ids=segment_ids,
        alive=segment_ids != 0,
        tokens=jnp.full((Batch.size, max_new_tokens), _NO_TOKEN, jnp.int32),
        logps=jnp.zeros((Batch.size, max_new_tokens), jnp.float32),
        step=jnp.int32(0),
        seen=_seen(prompt, model.Vocab.size) if distribution.reads_text else None,
    )
    return _with_next(model, state, first.cache, first.final, keys, stops, distribution), keys


@functools.cache
def _programs(xla_options: XlaOptions) -> tuple[jax.stages.Wrapped, ...]:
    """The programs that begin, finish and cross a length, once for each set of options: jax's caches know functions."""
    compiled = functools.partial(jax.jit, compiler_options=dict(xla_options))
    return compiled(_begin, static_argnums=6), compiled(_finish, donate_argnums=1), compiled(_cross)


def _seen(prompt: Inputs, vocab_size: int) -> jax.Array:
    """bool [rows, vocab]: whether a prompt has a token."""
    tokens, is_token = prompt.tokens.array, prompt.segment_ids.array != 0
    nothing = jnp.zeros((len(tokens), vocab_size), bool)
    return nothing.at[jnp.arange(len(tokens))[:, None], tokens].max(is_token)


def _finish(
    model: LanguageModel, state: _State, keys: jax.Array, stops: jax.Array, distribution: TokenDistribution
) -> _State:
    """Samples until all rows have ended, or a text will grow beyond a switch length. What the host reads is replicated, so
    that every process can read every row."""

    def one_token(state: _State) -> _State:
        hidden = model.hidden(next_inputs(state), cache=state.cache)
        return _with_next(model, state, hidden.cache, hidden.final, keys, stops, distribution)

    def goes_on(state: _State) -> jax.Array:
        return _goes_on(state) & ~rows_that_cross(model, state).any()

    state = jax.lax.while_loop(goes_on, one_token, state)
    return eqx.tree_at(lambda s: (s.tokens, s.logps), state, replicated((state.tokens, state.logps)))


def _cross(
    model: LanguageModel,
    step_model: Any,
    state: _State,
    keys: jax.Array,
    stops: jax.Array,
    distribution: TokenDistribution,
) -> _State:
    """Samples one token of each row, where the next token of some rows is the first beyond a switch length."""
    final, cache = step_across(model, step_model, state)
    return _with_next(step_model, state, cache, final, keys, stops, distribution)


@jax.jit
def _waits(model: LanguageModel, state: _State) -> jax.Array:
    """Tells whether `_finish` ended before a switch length, on every process."""
    return replicated(_goes_on(state) & rows_that_cross(model, state).any())


def _goes_on(state: _State) -> jax.Array:
    return (state.step < state.tokens.shape[1]) & state.alive.any()


def _logits(model: LanguageModel, last: NamedArray) -> jax.Array:
    """float32 [rows, vocab], with products like those of the loss: `model.logits` would round them to the model's dtype."""
    head = model.lm_head()
    if head is None:
        logits = last.rearrange((BATCH, VOCAB)).array.astype(jnp.float32)
    else:
        logits = einsum("bd,vd->bv", last.rearrange((BATCH, EMBED)).array, arranged(head, (VOCAB, EMBED)), jnp.float32)
    return soft_capped(logits, model.traits.logit_soft_cap)


def _with_next(
    model: LanguageModel,
    state: _State,
    cache: Any,
    final: NamedArray,
    keys: jax.Array,
    stops: jax.Array,
    distribution: TokenDistribution,
) -> _State:
    """The state with one more token of each row, sampled after the last of the hidden states."""
    logits = distribution.logits(_logits(model, final[POSITION, -1]), state.seen)
    keys_of_token = jax.vmap(jax.random.fold_in, (0, None))(keys, state.step)
    token = distribution.draw(logits, keys_of_token)
    logp = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=1)

    def written(rows: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(rows, new[:, None], state.step, axis=1)

    return _State(
        cache,
        token,
        state.positions + 1,
        state.segment_ids,
        state.alive & (token[:, None] != stops).all(axis=1),
        written(state.tokens, jnp.where(state.alive, token, _NO_TOKEN)),
        written(state.logps, jnp.where(state.alive, logp, 0.0)),
        state.step + 1,
        with_token(state.seen, token),
    )
