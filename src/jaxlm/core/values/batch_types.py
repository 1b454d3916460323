"""The batches that models and objectives read."""

import dataclasses
from typing import Any, ClassVar

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core.axes import BATCH, GROUP, KEY_WORD, PAIR, POSITION
from jaxlm.core.tree import is_named
from jaxlm.core.values.permutation import previous
from jaxlm.core.values.sums import TokenScores

_ROWS = 2**31 - 1  # folded into a step's key, into which the numbers of microbatches are folded too
_KEY_WORDS = 2
_NO_TOKEN = -1


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
        row_keys: uint32 {.., key_word} without `position`, a random key for each row (`Objective.prepare_batch`); None if
            the objective needs none, and in evaluations.
        order: int32, the index of each token in its row; None if tokens are in the order of the text.
    """

    tokens: hax.NamedArray
    targets: hax.NamedArray
    loss_mask: hax.NamedArray
    segment_ids: hax.NamedArray
    positions: hax.NamedArray
    annotations: Any = None
    row_keys: hax.NamedArray | None = None
    order: hax.NamedArray | None = None
    excluded: ClassVar[None] = None
    """The token of each position that has no probability: none."""
    mask_fractions: ClassVar[None] = None
    """The fraction of hidden tokens: none are."""
    mask_range: ClassVar[None] = None
    reads_later_tokens: ClassVar[bool | None] = False
    """Whether the model that is scored must see the tokens after the one that it predicts; None if it may."""

    def supervised(self) -> "TokenBatch":
        """The sequences that a supervised objective trains on."""
        return self

    def scores(self, nats: hax.NamedArray) -> TokenScores:
        """Scores of the targets. Args: nats: their negative log-likelihoods."""
        return TokenScores(nats, self.loss_mask, self.targets, self.tokens)

    def with_row_keys(self, key: jax.Array) -> "TokenBatch":
        """The batch with a random key for each row, numbered over all leading axes."""
        leading = tuple(axis for axis in self.tokens.axes if axis.name != POSITION)
        shape = (hax.axis_size(leading), _KEY_WORDS)
        words = jax.random.bits(jax.random.fold_in(key, _ROWS), shape, jnp.uint32)
        axes = (*leading, hax.Axis(KEY_WORD, _KEY_WORDS))
        return dataclasses.replace(self, row_keys=hax.named(words.reshape([axis.size for axis in axes]), axes))


class MaskedBatch(eqx.Module):
    """Sequences of which some tokens are hidden. Unless stated, every field has the axes {[microbatch,] batch, position}.

    Attributes:
        tokens: int32, what the model reads: the original tokens, with the mask token in the place of hidden ones.
        targets: int32, the original tokens.
        loss_mask: float32, 1 where a token is hidden.
        maskable: float32, 1 where one may be: not in padding, nor at special tokens or tokens without loss.
        segment_ids, positions: as in `TokenBatch`.
        mask_fractions: float32 {[microbatch,] batch}, the fraction of tokens that the time of the sequence hides.
        mask_ids: int32 {[microbatch,] batch}, the id of the mask token.
        rates: float32 {[microbatch,] batch}, the weight of a hidden token in the bound on the likelihood: the derivative of
            the logarithm of the mask fraction by the time. None if the times or the masks are such that there is no bound.
        annotations, order: as in `TokenBatch`.
        mask_range: the smallest and the largest of all mask fractions that the data has; None if that is not known.
    """

    tokens: hax.NamedArray
    targets: hax.NamedArray
    loss_mask: hax.NamedArray
    maskable: hax.NamedArray
    segment_ids: hax.NamedArray
    positions: hax.NamedArray
    mask_fractions: hax.NamedArray
    mask_ids: hax.NamedArray
    rates: hax.NamedArray | None = None
    annotations: Any = None
    order: hax.NamedArray | None = None
    mask_range: tuple[float, float] | None = eqx.field(static=True, default=None)
    reads_later_tokens: ClassVar[bool | None] = True

    def supervised(self) -> "MaskedBatch":
        """The sequences that a supervised objective trains on."""
        return self

    @property
    def excluded(self) -> hax.NamedArray | None:
        """int32 {batch, position}: the token that has no probability; None without a bound."""
        return None if self.rates is None else self.mask_ids.broadcast_axis(self.tokens.resolve_axis(POSITION))

    @property
    def weights(self) -> hax.NamedArray:
        """float32: the weight of each token's loss in the bound; in the mean over hidden tokens without a bound."""
        return self.loss_mask if self.rates is None else self.loss_mask * self.rates

    @property
    def counted(self) -> hax.NamedArray:
        """float32, 1 for the tokens that the sum of the weighted losses is divided by."""
        return self.loss_mask if self.rates is None else self.maskable

    def scores(self, nats: hax.NamedArray) -> TokenScores:
        """Scores of the targets. Args: nats: their negative log-likelihoods."""
        before = previous(self.targets, self.order, _NO_TOKEN)
        return TokenScores(hax.where(self.loss_mask > 0, nats * self.weights, 0.0), self.counted, self.targets, before)


class LabeledBatch(eqx.Module):
    """Sequences with labels. Every field has the axes {[microbatch,] batch, position}.

    Attributes:
        tokens: int32, input tokens.
        targets: int32, the label of each token, at its own position.
        loss_mask: float32, 1 where there is a label.
        segment_ids, positions, annotations, order: as in `TokenBatch`.
    """

    tokens: hax.NamedArray
    targets: hax.NamedArray
    loss_mask: hax.NamedArray
    segment_ids: hax.NamedArray
    positions: hax.NamedArray
    annotations: Any = None
    order: hax.NamedArray | None = None
    excluded: ClassVar[None] = None
    mask_fractions: ClassVar[None] = None
    mask_range: ClassVar[None] = None
    reads_later_tokens: ClassVar[bool | None] = None

    def supervised(self) -> "LabeledBatch":
        """The sequences that a supervised objective trains on."""
        return self

    def scores(self, nats: hax.NamedArray) -> TokenScores:
        """Scores of the labels. Args: nats: their negative log-likelihoods."""
        return TokenScores(nats, self.loss_mask, self.targets, previous(self.targets, self.order, _NO_TOKEN))


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

    @property
    def order(self) -> hax.NamedArray | None:
        """That of the sequences, {[microbatch,] batch, pair, position}."""
        return self.pairs.order

    def with_row_keys(self, key: jax.Array) -> "PairBatch":
        """The batch with a random key for each sequence."""
        return dataclasses.replace(self, pairs=self.pairs.with_row_keys(key))

    def half(self, number: int) -> TokenBatch:
        """The chosen (0) or rejected (1) sequences."""
        return jax.tree.map(lambda column: column[PAIR, number], self.pairs, is_leaf=is_named)

    def sequences(self) -> TokenBatch:
        """All sequences, chosen and rejected in turn, so that both halves of a pair stay on one device."""
        return jax.tree.map(lambda column: column.flatten_axes((BATCH, PAIR), BATCH), self.pairs, is_leaf=is_named)

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
    def of(rewards: hax.NamedArray, sampler_logps: hax.NamedArray | None = None, **fields: Any) -> "GroupBatch":
        """Makes a batch of the fields of this class and the columns of `responses`."""
        own = {
            name: fields.pop(name) for name in fields.keys() & {field.name for field in dataclasses.fields(GroupBatch)}
        }
        return GroupBatch(TokenBatch(**fields), rewards, sampler_logps=sampler_logps, **own)

    @property
    def order(self) -> hax.NamedArray | None:
        """That of the sequences, {[microbatch,] batch, group, position}."""
        return self.responses.order

    def sequences(self) -> TokenBatch:
        """All sequences, group by group, so that a group stays on one device."""
        flat = lambda column: column.flatten_axes((BATCH, GROUP), BATCH)  # noqa: E731
        return jax.tree.map(flat, self.responses, is_leaf=is_named)


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
    order: ClassVar[None] = None
    """Its annotations have no positions."""

    @staticmethod
    def of(labels: hax.NamedArray, **columns: hax.NamedArray) -> "UnpairedBatch":
        completions = {name: column for name, column in columns.items() if not name.startswith(MISMATCHED)}
        mismatched = {name.removeprefix(MISMATCHED): columns[name] for name in columns.keys() - completions.keys()}
        return UnpairedBatch(TokenBatch(**completions), TokenBatch(**mismatched), labels)


MISMATCHED = "mismatched_"
"""Prefix of the columns of `UnpairedBatch.mismatched`."""
