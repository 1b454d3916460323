"""What evaluations ask a model: sums over batches of data, log-likelihoods of continuations, and texts after prompts.

Every process runs every batch on the current layout's devices, and reads all results.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.errors import ConfigError, counted
from jaxlm.core.sharding import replicated
from jaxlm.core.values.permutation import in_text_order
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.inference.generate import GenerationConfig, generate_tokens, how_to_fit
from jaxlm.models.inference.padding import program_rows
from jaxlm.models.inference.sampling import StopFunction
from jaxlm.models.inference.tools.calls import ToolCalls
from jaxlm.models.inference.unstacked import Generator

TokenIds = Sequence[int] | np.ndarray

_MAX_IN_FLIGHT = 4  # see engine/metrics.py for why the queue must be short
_MIN_LENGTH = 32
# Positions per row for which logits are computed at once, so that [position, vocab] never exists in full.
_LOGIT_CHUNK = 64


def read_results(results: Iterable[Any]) -> Iterator[Any]:
    """Yields what programs return, on the host. At most a few are queued. Args: results: calls each program."""
    queued = deque()
    for result in results:
        queued.append(result)
        if len(queued) >= _MAX_IN_FLIGHT:
            yield jax.device_get(queued.popleft())
    yield from map(jax.device_get, queued)


def read_sums(results: Iterable[Any], shape: int | tuple[int, ...]) -> np.ndarray:
    """float64, the sum of what programs return. Args: results: as of `read_results`."""
    return sum((np.asarray(one, np.float64) for one in read_results(results)), np.zeros(shape))


def prompt_ids(tokenizer, prompt: str, *, bos: bool | None = True) -> list[int]:
    """The prompt's token ids.

    Args:
        bos: put the BOS token in front, if the tokenizer has one; None puts what the tokenizer itself puts there. An empty
            prompt gets BOS in any case: a model needs something to continue.
    """
    ids = [*tokenizer.ids_before(bos=bos), *tokenizer.encode(prompt)]
    return ids or list(tokenizer.ids_before(bos=True))


def check_fits(prompt: str, num_tokens: int, max_new_tokens: int, seq_len: int) -> None:
    """Raises `ConfigError` if a prompt and the tokens after it are too long for a model. Args: prompt: which it is."""
    if num_tokens + max_new_tokens > seq_len:
        and_new = f" and max_new_tokens is {max_new_tokens}, which together" if max_new_tokens else ", which"
        raise ConfigError(
            f"{prompt} has {counted(num_tokens, 'token')}{and_new} exceed model.seq_len: {seq_len}."
            f" {how_to_fit(num_tokens, seq_len)}"
        )


def num_shared(*rows: Sequence[int] | np.ndarray) -> int:
    """Counts the tokens that all rows begin with."""
    shortest = min(map(len, rows))
    differs = np.any([np.asarray(row[:shortest]) != rows[0][:shortest] for row in rows], axis=0)
    return int(differs.argmax()) if differs.any() else shortest


@jax.jit
def text_columns(batch: Any) -> tuple[jax.Array, jax.Array]:
    """int32 [row, position]: tokens and segments of a validation batch in the order of the text."""
    batch = batch.supervised()

    def of(column: NamedArray) -> jax.Array:
        return in_text_order(column, batch.order).rearrange((BATCH, POSITION)).array

    return replicated((of(batch.tokens), of(batch.segment_ids)))


@dataclass(frozen=True)
class Scored:
    """Score of a continuation.

    Attributes:
        log_likelihood: log-likelihood in nats, summed over its tokens.
        is_greedy: whether greedy decoding would produce it.
    """

    log_likelihood: float
    is_greedy: bool


@dataclass(eq=False)
class BatchedModel:
    """A model that is asked about many prompts, in batches with few distinct shapes.

    Attributes:
        batch_size: rows per batch; rounded up to a multiple of the number of devices that share a batch.
        progress: called while there is progress, so that a long evaluation is not taken for one that hangs.
    """

    model: LanguageModel
    batch_size: int
    progress: Callable[[], None] = lambda: None

    def score(self, pairs: Sequence[tuple[TokenIds, TokenIds]], max_length: int | None = None) -> list[Scored]:
        """Log-likelihood of each continuation given its context.

        If a pair is longer than the model's sequence length, the start of its context is truncated.

        Args:
            pairs: token ids of context (at least one token) and continuation.
            max_length: truncates to this length instead of the model's sequence length.
        """
        max_length = self.model.Pos.size if max_length is None else max_length
        longest = max((len(continuation) for _, continuation in pairs), default=0)
        if longest > max_length:
            raise ConfigError(
                f"a continuation has {longest} tokens, but the model's maximum sequence length is {max_length}"
            )
        rows = program_rows(self.batch_size)
        # Longest first, so that running out of memory shows at once.
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        batches = [[pairs[i] for i in order[start : start + rows]] for start in range(0, len(order), rows)]
        results = (_sums(self.model, *map(jnp.asarray, _columns(batch, rows, max_length))) for batch in batches)
        scores: list[Scored] = []
        for batch, (sums, greedy) in zip(batches, read_results(results), strict=True):
            scores += [Scored(float(sums[row]), bool(greedy[row])) for row in range(len(batch))]
            self.progress()
        by_pair = dict(zip(order, scores, strict=True))
        return [by_pair[i] for i in range(len(pairs))]

    def generate(
        self,
        prompts: Sequence[list[int]],
        config: GenerationConfig,
        until: StopFunction | None = None,
        tools: ToolCalls | None = None,
    ) -> list[list[int]]:
        """The new tokens of each prompt. Arguments and errors as of `generate_tokens`, which gets the prompts in order."""

        def ends(tokens: list[int]) -> bool:
            self.progress()
            return until is not None and until(tokens)

        rows: list[list[int]] = []
        for start in range(0, len(prompts), self.batch_size):
            batch = prompts[start : start + self.batch_size]
            rows += generate_tokens(self._generator, batch, config, ends, tools)
        return rows

    @functools.cached_property
    def _generator(self) -> Generator:
        return Generator.of(self.model)


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
