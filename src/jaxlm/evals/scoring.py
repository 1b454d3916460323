"""Log-likelihoods of continuations: many of them, in batches of few shapes, on the devices of the current layout."""

from collections.abc import Sequence
from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import current_layout
from jaxlm.models.base import Inputs, LanguageModel

_SHORTEST = 32
_LOGITS_AT_ONCE = 64  # positions of a row: never [position, vocab] of all of it


@dataclass(frozen=True)
class Scored:
    """What a model says of a continuation.

    Attributes:
        log_likelihood: nats, summed over its tokens.
        is_greedy: whether each of its tokens is the likeliest one.
    """

    log_likelihood: float
    is_greedy: bool


def score(model: LanguageModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch_size: int) -> list[Scored]:
    """How likely each continuation is behind its context.

    What is longer than the model reads loses the beginning of its context.

    Args:
        pairs: token ids of context, at least one, and continuation.
        batch_size: rows at once; rounded up to what divides over the devices.

    Raises:
        ConfigError: a continuation alone is longer than the model reads.
    """
    longest = max((len(continuation) for _, continuation in pairs), default=0)
    if longest > model.Pos.size:
        raise ConfigError(f"a continuation has {longest} tokens; the model reads {model.Pos.size}")
    layout = current_layout()
    num_shards = 1 if layout is None else layout.num_shards(BATCH)
    rows = -(-batch_size // num_shards) * num_shards
    found: list[Scored | None] = [None] * len(pairs)
    # The longest first: whatever does not fit into memory shows at once.
    order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    for start in range(0, len(order), rows):
        numbers = order[start : start + rows]
        columns = _columns([pairs[i] for i in numbers], rows, model.Pos.size)
        sums, greedy = (np.asarray(a) for a in _sums(model, *map(jnp.asarray, columns)))
        for row, number in enumerate(numbers):
            found[number] = Scored(float(sums[row]), bool(greedy[row]))
    return [one for one in found if one is not None]


def _columns(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], rows: int, most: int) -> list[np.ndarray]:
    """Tokens [rows, length], how many of each row are real, and where and how long its continuation is."""
    whole = [[*context, *continuation][-(most + 1) :] for context, continuation in pairs]
    length = min(most, _power_of_two(max(len(ids) - 1 for ids in whole)))
    asked = min(length, _power_of_two(max(len(continuation) for _, continuation in pairs)))
    tokens, targets = np.zeros((rows, length), np.int32), np.zeros((rows, asked), np.int32)
    sizes, firsts, counts = (np.zeros(rows, np.int32) for _ in range(3))
    for row, (ids, (_, continuation)) in enumerate(zip(whole, pairs, strict=True)):
        count = len(continuation)
        tokens[row, : len(ids) - 1] = ids[:-1]
        targets[row, :count] = ids[len(ids) - count :]
        sizes[row], firsts[row], counts[row] = len(ids) - 1, len(ids) - 1 - count, count
    return [tokens, targets, sizes, firsts, counts]


def _power_of_two(n: int) -> int:
    return max(_SHORTEST, 1 << (n - 1).bit_length())


@jax.jit
def _sums(
    model: LanguageModel,
    tokens_BT: jax.Array,
    targets_BC: jax.Array,
    sizes_B: jax.Array,
    firsts_B: jax.Array,
    counts_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """float32 [rows], the sum of log-probabilities; bool [rows], whether all are the largest."""
    rows, length = tokens_BT.shape
    axes = (Axis(BATCH, rows), Axis(POSITION, length))
    place = jnp.broadcast_to(jnp.arange(length), tokens_BT.shape)
    columns = (tokens_BT, place, (place < sizes_B[:, None]).astype(jnp.int32))
    final = model.hidden(hax.auto_sharded(Inputs(*(hax.named(c, axes) for c in columns)))).final
    final = final.rearrange((BATCH, POSITION, ...))

    def some(carry: tuple[jax.Array, jax.Array], start: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        number = start + jnp.arange(at_once)
        at_BC = jnp.minimum(firsts_B[:, None] + number, length - 1)
        hidden = jnp.take_along_axis(final.array, at_BC[..., None], axis=1)
        named = NamedArray(hidden, (axes[0], Axis(POSITION, at_once), *final.axes[2:]))
        logits = model.logits(named).rearrange((BATCH, POSITION, model.Vocab)).array.astype(jnp.float32)
        target = jax.lax.dynamic_slice_in_dim(targets_BC, start, at_once, axis=1)
        of_target = jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], axis=-1)[..., 0]
        counts = number < counts_B[:, None]
        greedy = (jnp.argmax(logits, axis=-1) == target) | ~counts
        return (carry[0] + jnp.where(counts, of_target, 0.0).sum(axis=1), carry[1] & greedy.all(axis=1)), None

    at_once = min(_LOGITS_AT_ONCE, targets_BC.shape[1])
    padded = -targets_BC.shape[1] % at_once
    targets_BC = jnp.pad(targets_BC, ((0, 0), (0, padded)))
    begun = (jnp.zeros(rows, jnp.float32), jnp.ones(rows, bool))
    sums, _ = jax.lax.scan(some, begun, jnp.arange(0, targets_BC.shape[1], at_once))
    layout = current_layout()
    return sums if layout is None else jax.lax.with_sharding_constraint(sums, layout.replicated())
