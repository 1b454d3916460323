"""Values passed between packages: weighted sums, batches, metrics of a step."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.axes import BATCH, GROUP, KEY_WORD, PAIR, POSITION


class Sum(eqx.Module):
    """A weighted sum and its total weight.

    Losses and metrics stay sums as long as possible: sums over microbatches, masked rows and devices can be added, means
    cannot.

    Attributes:
        total: scalar float32, the weighted sum.
        weight: scalar float32, the denominator of the mean.
    """

    total: jax.Array
    weight: jax.Array

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total, self.weight + other.weight)

    def mean(self) -> jax.Array:
        """total / weight; 0 if the weight is 0."""
        return self.total / jnp.where(self.weight == 0, 1.0, self.weight)

    def over_microbatches(self) -> "Sum":
        """The sum over the leading axis."""
        return Sum(jnp.sum(self.total, axis=0), jnp.sum(self.weight, axis=0))

    def logged(self) -> jax.Array:
        """The number that is logged."""
        return self.mean()


class Largest(eqx.Module):
    """The largest of some numbers, for a metric that is no mean.

    Attributes:
        value: scalar float32.
    """

    value: jax.Array

    def over_microbatches(self) -> "Largest":
        """The largest over the leading axis."""
        return Largest(jnp.max(self.value, axis=0))

    def logged(self) -> jax.Array:
        """The number that is logged."""
        return self.value


_ROWS = 2**31 - 1  # folded into a step's key, into which the numbers of microbatches are folded too
_KEY_WORDS = 2


class TokenBatch(eqx.Module):
    """Packed token sequences. Every field has the axes {[microbatch,] batch, position}.

    Attributes:
        tokens: int32, input tokens.
        targets: int32, the token that follows each input token.
        loss_mask: float32, 1 if the target counts toward the loss; 0 on padding and if the target belongs to another
            document.
        segment_ids: int32, number of the document within its row, from 1; 0 is padding.
        positions: int32, position within the document (within the row for a document that started in an earlier row).
        annotations: what the objective's references said about the tokens (`Objective.annotate`), a tree of named arrays;
            None if they were not asked.
        row_keys: uint32 {.., key_word} without `position`, a random key for each row (`Objective.with_row_keys`); None if
            the objective needs none, and in evaluations.
    """

    tokens: hax.NamedArray
    targets: hax.NamedArray
    loss_mask: hax.NamedArray
    segment_ids: hax.NamedArray
    positions: hax.NamedArray
    annotations: Any = None
    row_keys: hax.NamedArray | None = None

    def supervised(self) -> "TokenBatch":
        """The sequences that a supervised objective trains on."""
        return self

    def with_row_keys(self, key: jax.Array) -> "TokenBatch":
        """The batch with a random key for each row, numbered over all leading axes."""
        leading = tuple(axis for axis in self.tokens.axes if axis.name != POSITION)
        shape = (math.prod(axis.size for axis in leading), _KEY_WORDS)
        words = jax.random.bits(jax.random.fold_in(key, _ROWS), shape, jnp.uint32)
        axes = (*leading, hax.Axis(KEY_WORD, _KEY_WORDS))
        return dataclasses.replace(self, row_keys=hax.named(words.reshape([axis.size for axis in axes]), axes))


class PairBatch(eqx.Module):
    """Pairs of completions of the same prompt.

    Attributes:
        pairs: the columns of `TokenBatch`, with the axes {[microbatch,] batch, pair, position}. The first half of a pair is
            the prompt with the chosen completion, the second with the rejected. The loss mask selects the completion.
        annotations: what the objective's references said about the pairs, as in `TokenBatch`.
    """

    pairs: TokenBatch
    annotations: Any = None

    @staticmethod
    def of(**columns: hax.NamedArray) -> "PairBatch":
        return PairBatch(TokenBatch(**columns))

    def with_row_keys(self, key: jax.Array) -> "PairBatch":
        """The batch with a random key for each sequence."""
        return dataclasses.replace(self, pairs=self.pairs.with_row_keys(key))

    def half(self, number: int) -> TokenBatch:
        """The chosen (0) or rejected (1) sequences."""
        return jax.tree.map(lambda column: column[PAIR, number], self.pairs, is_leaf=_is_named)

    def sequences(self) -> TokenBatch:
        """All sequences, chosen and rejected in turn, so that both halves of a pair stay on one device."""
        return jax.tree.map(lambda column: column.flatten_axes((BATCH, PAIR), BATCH), self.pairs, is_leaf=_is_named)

    def supervised(self) -> TokenBatch:
        """The chosen sequences."""
        return self.half(0)


class GroupBatch(eqx.Module):
    """Groups of responses that a model has sampled for the same prompt, each with a reward.

    Attributes:
        responses: the columns of `TokenBatch`, with the axes {[microbatch,] batch, group, position}. Each sequence is the
            prompt with a response. The loss mask selects the response.
        rewards: float32 {[microbatch,] batch, group}.
        annotations: what the objective's references said about the responses, as in `TokenBatch`.
        sampler_logps: float32, with the axes of `responses`: the log-likelihood of each target under the distribution that it
            was sampled from; None if it is unknown.
        std_of_batch: float32 {[microbatch,] batch}, a number of the whole batch by which the objective divides advantages;
            None if it needs none.
        finished: float32 {[microbatch,] batch, group}, 1 for a response that has ended by itself, 0 for one that was cut off;
            None if it is unknown.
        reward_parts: float32 {[microbatch,] batch, group, reward}, the rewards that were added, NaN where one does not apply;
            None if there is only their sum.
        reward_weights: their weights in the sum.
        advantages: float32 {[microbatch,] batch, group}, if the objective computes them of the whole batch.
        temperature: what the logits were divided by when the responses were sampled.
        samples_all: whether they were sampled from the distribution of the model at this temperature, and not from a part or
            another form of it.
    """

    responses: TokenBatch
    rewards: hax.NamedArray
    annotations: Any = None
    sampler_logps: hax.NamedArray | None = None
    std_of_batch: hax.NamedArray | None = None
    finished: hax.NamedArray | None = None
    reward_parts: hax.NamedArray | None = None
    advantages: hax.NamedArray | None = None
    reward_weights: tuple[float, ...] = eqx.field(static=True, default=())
    temperature: float = eqx.field(static=True, default=1.0)
    samples_all: bool = eqx.field(static=True, default=True)

    @staticmethod
    def of(
        rewards: hax.NamedArray,
        sampler_logps: hax.NamedArray | None = None,
        *,
        finished: hax.NamedArray | None = None,
        reward_parts: hax.NamedArray | None = None,
        reward_weights: tuple[float, ...] = (),
        temperature: float = 1.0,
        samples_all: bool = True,
        **columns: hax.NamedArray,
    ) -> "GroupBatch":
        return GroupBatch(
            TokenBatch(**columns),
            rewards,
            sampler_logps=sampler_logps,
            finished=finished,
            reward_parts=reward_parts,
            reward_weights=reward_weights,
            temperature=temperature,
            samples_all=samples_all,
        )

    def sequences(self) -> TokenBatch:
        """All sequences, group by group, so that a group stays on one device."""
        flat = lambda column: column.flatten_axes((BATCH, GROUP), BATCH)  # noqa: E731
        return jax.tree.map(flat, self.responses, is_leaf=_is_named)


class UnpairedBatch(eqx.Module):
    """Completions that are desirable or not.

    Attributes:
        completions: each prompt with its completion, {[microbatch,] batch, position}. The loss mask selects the completion.
        mismatched: each prompt with the completion of another record.
        labels: float32 {[microbatch,] batch}, 1 for a desirable completion, 0 for another.
        annotations: what the objective's references said about both, as in `TokenBatch`.
    """

    completions: TokenBatch
    mismatched: TokenBatch
    labels: hax.NamedArray
    annotations: Any = None

    @staticmethod
    def of(labels: hax.NamedArray, **columns: hax.NamedArray) -> "UnpairedBatch":
        own = {name: column for name, column in columns.items() if not name.startswith(MISMATCHED)}
        others = {name.removeprefix(MISMATCHED): column for name, column in columns.items() if name not in own}
        return UnpairedBatch(TokenBatch(**own), TokenBatch(**others), labels)


MISMATCHED = "mismatched_"
"""Prefix of the columns of `UnpairedBatch.mismatched`."""


def _is_named(leaf: Any) -> bool:
    return isinstance(leaf, hax.NamedArray)


@dataclass(frozen=True)
class DummyPrefix:
    """The space that some tokenizers put in front of every text. It is no byte of the text.

    Attributes:
        bos_id: the token before a text.
        tokens: bool [vocab], the tokens that begin with a space.
    """

    bos_id: int
    tokens: np.ndarray


class TokenScores(eqx.Module):
    """How well a model predicts each target of a batch. Every field has the axes {batch, position}.

    Attributes:
        nats: float32, negative log-likelihood of the target.
        mask: float32, 1 if the target counts.
        targets: int32, the target's token id.
        inputs: int32, the id of the token before the target.
    """

    nats: hax.NamedArray
    mask: hax.NamedArray
    targets: hax.NamedArray
    inputs: hax.NamedArray


@dataclass(frozen=True)
class Histogram:
    """Counts of an array's values in bins of equal width.

    Attributes:
        low, high: smallest and largest value: the outer edges of the first and last bin.
        counts: number of values per bin, from low to high.
    """

    low: float
    high: float
    counts: tuple[int, ...]

    @property
    def edges(self) -> tuple[float, ...]:
        """Bin edges, one more than there are bins. If all values are equal, the histogram is 1 wide."""
        width = (self.high - self.low if self.high > self.low else 1.0) / len(self.counts)
        return tuple(self.low + width * number for number in range(len(self.counts) + 1))

    @property
    def is_empty(self) -> bool:
        """Whether no value was finite. `low` and `high` have no meaning then."""
        return not any(self.counts)


@dataclass(frozen=True)
class Completion:
    """What the policy wrote to a prompt, and its rewards.

    Attributes:
        name: `train` for a rollout, `eval` for an evaluation, or `eval/<name>` for one of an average of the weights.
        place: where the prompt's record is.
        text: the completion.
        rewards: by name; None where a reward does not apply.
        reward: their weighted sum.
        advantage: None if nothing is trained on it.
        is_finished: whether the policy ended it, and not the limit of tokens.
    """

    name: str
    place: str
    prompt: str
    text: str
    rewards: Mapping[str, float | None]
    reward: float
    advantage: float | None
    is_finished: bool


@dataclass(frozen=True)
class Sample:
    """Text that an evaluation has generated.

    Attributes:
        name: `eval` for the weights, or `eval/<name>` for an average of them.
        prompt: the text before it.
        text: the model's continuation.
    """

    name: str
    prompt: str
    text: str


@dataclass(frozen=True)
class StepInfo:
    """The numbers of a finished step, fetched to the host and passed to the listeners.

    Attributes:
        step: number of steps in the whole run, including this one (`step-N` = N).
        phase: name of the phase.
        metrics: Python numbers by metric name.
        histograms: histograms of the watched arrays, by name.
    """

    step: int
    phase: str
    metrics: Mapping[str, float]
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
