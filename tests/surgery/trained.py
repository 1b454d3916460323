"""A teacher that has learned Python's source, for losses right after a surgery."""

import argparse
import inspect
from collections.abc import Callable

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.models.base import Inputs, LanguageModel, vocab_axis
from jaxlm.models.loss import token_losses

_ROWS = 16


@jax.jit
def nll(model, read):
    hidden = model.hidden(Inputs(read.tokens, read.positions, read.segment_ids)).final
    return jnp.mean(token_losses(hidden, model.lm_head(), read.targets).array)


def trained(config, seed) -> tuple[LanguageModel, Callable[[], TokenBatch], TokenBatch]:
    """A teacher after 300 steps, further training batches, and a held-out one."""
    length = config.seq_len
    text = np.frombuffer(inspect.getsource(argparse).encode("ascii", "replace"), np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    axes = (hax.Axis("batch", _ROWS), hax.Axis("position", length))

    def batch(low, high):
        rows = text[rng.integers(low, high, _ROWS)[:, None] + np.arange(length + 1)]
        positions, ones = np.tile(np.arange(length), (_ROWS, 1)), np.ones((_ROWS, length), np.int32)
        columns = (rows[:, :-1], rows[:, 1:], positions, ones)
        tokens, targets, positions, segments = (hax.named(jnp.asarray(a), axes) for a in columns)
        return TokenBatch(tokens, targets, hax.ones(axes), segments, positions)

    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(model, state, read):
        _, gradient = jax.value_and_grad(nll)(model, read)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(model, updates), state

    teacher = jax.jit(lambda key: config.build(vocab_axis(128), key=key))(jax.random.key(seed))
    state, end = optimizer.init(teacher), len(text) - 20_000
    for _ in range(300):
        teacher, state = step(teacher, state, batch(0, end - length))
    return teacher, lambda: batch(0, end - length), batch(end, len(text) - length - 1)
