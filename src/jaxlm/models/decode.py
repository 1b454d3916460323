"""Text from a model: one pass over the prompts, then token by token with a cache.

Prompts of a batch are padded on the left, so that all rows end at the same slot; padding is segment 0, which nothing
attends to. Lengths are rounded up to multiples, so that few shapes are ever compiled.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
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
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.sampling import Sampling

_LENGTH_MULTIPLE = 64
_NO_TOKEN = -1


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

    What a row draws depends on `seed` and its own prompt only, not on the rows beside it; a prompt that is given
    several times gets a different continuation each time.

    Args:
        prompts: token ids, at least one a prompt.
        temperature, top_k, top_p: see `Sampling`.
        eos_id: the token that ends a continuation; None never ends one early.

    Returns:
        The new tokens of each prompt, without the prompt and without `eos_id`.

    Raises:
        ConfigError: an empty prompt, an id beyond the vocabulary, or more tokens than the model's `Pos`.
    """
    sampling = Sampling(temperature, top_k, top_p)
    _check(prompts, max_new_tokens, model)
    if not prompts or max_new_tokens == 0:
        return [[] for _ in prompts]
    width = _rounded_up(max(map(len, prompts)), _LENGTH_MULTIPLE)
    rows = _rounded_up(len(prompts), _batch_multiple())
    new = _continue(
        model,
        _left_padded(prompts, rows, width),
        _row_keys(prompts, rows, seed),
        jnp.int32(max_new_tokens),
        jnp.int32(_NO_TOKEN if eos_id is None else eos_id),
        sampling,
        _rounded_up(max_new_tokens, _LENGTH_MULTIPLE),
    )
    return [_until_end(row[:max_new_tokens], eos_id) for row in np.asarray(new)[: len(prompts)]]


def _check(prompts: Sequence[Sequence[int]], max_new_tokens: int, model: LanguageModel) -> None:
    vocab_size, seq_len = model.Vocab.size, model.Pos.size
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens: {max_new_tokens} given, 0 or more expected")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {i} is empty: give it at least one token, for example the tokenizer's BOS")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise ConfigError(
                f"prompt {i} has ids from {min(prompt)} to {max(prompt)}; the vocabulary has {vocab_size}"
            )
        if len(prompt) + max_new_tokens > seq_len:
            raise ConfigError(
                f"prompt {i} has {len(prompt)} tokens, which with max_new_tokens = {max_new_tokens} exceed the model's"
                f" seq_len of {seq_len}. Shorten the prompt or set max_new_tokens to at most {seq_len - len(prompt)}"
            )


def _rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _batch_multiple() -> int:
    """Over how many devices the rows of a batch are spread."""
    layout = current_layout()
    if layout is None:
        return 1
    axes = layout.compute.get(BATCH, ())
    return int(np.prod([layout.mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes)], dtype=int))


def _left_padded(prompts: Sequence[Sequence[int]], rows: int, width: int) -> Inputs:
    tokens, positions, segment_ids = (np.zeros((rows, width), np.int32) for _ in range(3))
    for row, prompt in enumerate(prompts):
        start = width - len(prompt)
        tokens[row, start:] = prompt
        positions[row, start:] = np.arange(len(prompt))
        segment_ids[row, start:] = 1
    axes = (Axis(BATCH, rows), Axis(POSITION, width))
    return Inputs(*(hax.named(jnp.asarray(a), axes) for a in (tokens, positions, segment_ids)))


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


def _until_end(row: np.ndarray, eos_id: int | None) -> list[int]:
    ends = np.flatnonzero(row == (_NO_TOKEN if eos_id is None else eos_id))
    return row[: ends[0] if len(ends) else None].tolist()


class _Decoding(eqx.Module):
    """What the loop carries. Row r has written `written[r, :step]`; `token` is the last of it."""

    cache: Any
    token: jax.Array
    positions: jax.Array
    alive: jax.Array
    written: jax.Array
    step: jax.Array


@eqx.filter_jit
def _continue(
    model: LanguageModel,
    prompt: Inputs,
    keys: jax.Array,
    num_new: jax.Array,
    eos_id: jax.Array,
    sampling: Sampling,
    room: int,
) -> jax.Array:
    """Up to `num_new` tokens a row, int32 [rows, room]; `sampling` and `room` are compiled in."""
    prompt = hax.auto_sharded(prompt)
    Batch, Width = prompt.tokens.resolve_axis(BATCH), prompt.tokens.resolve_axis(POSITION)
    real_row = prompt.segment_ids[POSITION, -1].array != 0

    def choose(final: NamedArray, step: jax.Array) -> jax.Array:
        logits = model.logits(final[POSITION, -1]).rearrange((BATCH, model.Vocab)).array
        return sampling.draw(logits.astype(jnp.float32), jax.vmap(jax.random.fold_in, (0, None))(keys, step))

    def write(state: _Decoding, token: jax.Array) -> _Decoding:
        token = jnp.where(state.alive, token, eos_id)
        written = jax.lax.dynamic_update_slice_in_dim(state.written, token[:, None], state.step, axis=1)
        alive = state.alive & (token != eos_id)
        return _Decoding(state.cache, token, state.positions + 1, alive, written, state.step + 1)

    def advance(state: _Decoding) -> _Decoding:
        columns = (jnp.maximum(state.token, 0), state.positions, real_row.astype(jnp.int32))
        inputs = Inputs(*(hax.named(c[:, None], (Batch, Axis(POSITION, 1))) for c in columns))
        hidden = model.hidden(inputs, cache=state.cache)
        return write(eqx.tree_at(lambda s: s.cache, state, hidden.cache), choose(hidden.final, state.step))

    dtype = next(leaf.dtype for leaf in jax.tree.leaves(model) if eqx.is_inexact_array(leaf))
    first = model.hidden(prompt, cache=model.init_cache(Batch, Width.size + room, dtype))
    state = _Decoding(
        first.cache,
        token=jnp.zeros(Batch.size, jnp.int32),
        positions=prompt.positions[POSITION, -1].array,
        alive=real_row,
        written=jnp.full((Batch.size, room), eos_id),
        step=jnp.int32(0),
    )
    state = write(state, choose(first.final, state.step))
    written = jax.lax.while_loop(lambda s: (s.step < num_new) & s.alive.any(), advance, state).written
    layout = current_layout()
    # Every process reads every row.
    return written if layout is None else jax.lax.with_sharding_constraint(written, layout.replicated())
