"""Computes log-likelihoods of many continuations, in batches with few distinct shapes, on the current layout's devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import replicated
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.inference.padding import program_rows

TokenIds = Sequence[int] | np.ndarray

_MIN_LENGTH = 32
# Positions per row for which logits are computed at once, so that [position, vocab] never exists in full.
_LOGIT_CHUNK = 64


@dataclass(frozen=True)
class Scored:
    """Score of a continuation.

    Attributes:
        log_likelihood: log-likelihood in nats, summed over its tokens.
        is_greedy: whether greedy decoding would produce it.
    """

    log_likelihood: float
    is_greedy: bool


def score(
    model: LanguageModel,
    pairs: Sequence[tuple[TokenIds, TokenIds]],
    batch_size: int,
    progress: Callable[[], None] = lambda: None,
    max_length: int | None = None,
) -> list[Scored]:
    """Log-likelihood of each continuation given its context.

    If a pair is longer than the model's sequence length, the start of its context is truncated.

    Args:
        pairs: token ids of context (at least one token) and continuation.
        batch_size: rows per batch; rounded up to a multiple of the number of devices that share a batch.
        progress: called after each batch.
        max_length: truncates to this length instead of the model's sequence length.
    """
    max_length = model.Pos.size if max_length is None else max_length
    longest = max((len(continuation) for _, continuation in pairs), default=0)
    if longest > max_length:
        raise ConfigError(
            f"a continuation has {longest} tokens, but the model's maximum sequence length is {max_length}"
        )
    rows = program_rows(batch_size)
    scores: list[Scored | None] = [None] * len(pairs)
    # Longest first, so that running out of memory shows at once.
    order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        columns = _columns([pairs[i] for i in batch], rows, max_length)
        sums, greedy = (np.asarray(a) for a in _sums(model, *map(jnp.asarray, columns)))
        for row, i in enumerate(batch):
            scores[i] = Scored(float(sums[row]), bool(greedy[row]))
        progress()
    return [scored for scored in scores if scored is not None]


def _columns(pairs: Sequence[tuple[TokenIds, TokenIds]], rows: int, max_length: int) -> list[np.ndarray]:
    """Padded batch: tokens [rows, length], targets [rows, target_length], and per row the number of tokens, the position of
    the first target and the number of targets."""
    sequences = [[*context, *continuation][-(max_length + 1) :] for context, continuation in pairs]
    length = min(max_length, _power_of_two(max(len(ids) - 1 for ids in sequences)))
    target_length = min(length, _power_of_two(max(len(continuation) for _, continuation in pairs)))
    tokens, targets = np.zeros((rows, length), np.int32), np.zeros((rows, target_length), np.int32)
    sizes, firsts, counts = (np.zeros(rows, np.int32) for _ in range(3))
    for row, (ids, (_, continuation)) in enumerate(zip(sequences, pairs, strict=True)):
        count = len(continuation)
        tokens[row, : len(ids) - 1] = ids[:-1]
        targets[row, :count] = ids[len(ids) - count :]
        sizes[row], firsts[row], counts[row] = len(ids) - 1, len(ids) - 1 - count, count
    return [tokens, targets, sizes, firsts, counts]


def _power_of_two(n: int) -> int:
    return max(_MIN_LENGTH, 1 << (n - 1).bit_length())


@jax.jit
def _sums(
    model: LanguageModel,
    tokens_BT: jax.Array,
    targets_BC: jax.Array,
    sizes_B: jax.Array,
    firsts_B: jax.Array,
    counts_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """float32 [rows], the sum of the targets' log-probabilities; bool [rows], whether every target is the argmax."""
    rows, length = tokens_BT.shape
    axes = (Axis(BATCH, rows), Axis(POSITION, length))
    positions_BT = jnp.broadcast_to(jnp.arange(length), tokens_BT.shape)
    columns = (tokens_BT, positions_BT, (positions_BT < sizes_B[:, None]).astype(jnp.int32))
    final = model.hidden(hax.auto_sharded(Inputs(*(hax.named(c, axes) for c in columns)))).final
    final = final.rearrange((BATCH, POSITION, ...))

    def score_chunk(carry: tuple[jax.Array, jax.Array], start: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        number = start + jnp.arange(chunk)
        at_BC = jnp.minimum(firsts_B[:, None] + number, length - 1)
        hidden = jnp.take_along_axis(final.array, at_BC[..., None], axis=1)
        hidden = NamedArray(hidden, (axes[0], Axis(POSITION, chunk), *final.axes[2:]))
        logits = model.logits(hidden).rearrange((BATCH, POSITION, model.Vocab)).array.astype(jnp.float32)
        target = jax.lax.dynamic_slice_in_dim(targets_BC, start, chunk, axis=1)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], axis=-1)[..., 0]
        is_target = number < counts_B[:, None]
        greedy = (jnp.argmax(logits, axis=-1) == target) | ~is_target
        return (carry[0] + jnp.where(is_target, log_probs, 0.0).sum(axis=1), carry[1] & greedy.all(axis=1)), None

    chunk = min(_LOGIT_CHUNK, targets_BC.shape[1])
    padding = -targets_BC.shape[1] % chunk
    targets_BC = jnp.pad(targets_BC, ((0, 0), (0, padding)))
    initial = (jnp.zeros(rows, jnp.float32), jnp.ones(rows, bool))
    sums, _ = jax.lax.scan(score_chunk, initial, jnp.arange(0, targets_BC.shape[1], chunk))
    return replicated(sums)
