"""A kind of data with two columns of its own, and the objective that reads them."""

from dataclasses import dataclass, replace

import equinox as eqx
import haliax as hax
import numpy as np

from jaxlm.core.axes import POSITION
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.data.batch import BatchSpec, Column, token_columns
from jaxlm.data.config import DataConfig
from jaxlm.data.packing import PackedSequences
from jaxlm.data.tokens import TokensConfig
from jaxlm.objectives.base import ObjectiveConfig, ObjectiveFacts
from jaxlm.objectives.next_token import NextToken


class GradedBatch(eqx.Module):
    """Sequences with a grade each, and the age of each token.

    Attributes:
        sequences: the sequences.
        grade: float32 {[microbatch,] batch}.
        age: float32 {[microbatch,] batch, position}.
    """

    sequences: TokenBatch
    grade: hax.NamedArray
    age: hax.NamedArray

    @staticmethod
    def of(grade, age, **columns):
        """From the columns of the spec."""
        return GradedBatch(TokenBatch(**columns), grade, age)

    def supervised(self):
        """What evaluations read."""
        return self.sequences


class GradedSequences(PackedSequences):
    """Sequences of which every other one counts more."""

    def read(self, indices):
        """The columns of the tokens, and two more."""
        columns = super().read(indices)
        return columns | {
            "grade": np.where(indices % 2, 2.0, 1.0).astype(np.float32),
            "age": 1 / (1 + columns["positions"].astype(np.float32)),
        }


@dataclass(frozen=True)
class GradedData(DataConfig):
    """In YAML: `data: {type: "acme_lm.graded:GradedData", ...}`."""

    def batch_spec(self, seq_len):
        """Two columns beside the tokens."""
        Position = hax.Axis(POSITION, seq_len)
        columns = {"grade": Column(np.float32, ()), "age": Column(np.float32, (Position,))}
        return BatchSpec(GradedBatch.of, token_columns(Position) | columns)

    def arrange(self, cache, record_format, seq_len):
        """One source's examples."""
        return GradedSequences(cache, seq_len)

    def random_columns(self, num_examples, seq_len, vocab_size, seed):
        """For `jaxlm bench`."""
        columns = TokensConfig().random_columns(num_examples, seq_len, vocab_size, seed)
        return columns | {
            "grade": np.ones(num_examples, np.float32),
            "age": np.ones((num_examples, seq_len), np.float32),
        }


class UnscoredBatch(eqx.Module):
    """Sequences that no evaluation can read. Attributes: sequences: the sequences."""

    sequences: TokenBatch

    @staticmethod
    def of(**columns):
        """From the columns of the spec."""
        return UnscoredBatch(TokenBatch(**columns))


@dataclass(frozen=True)
class UnscoredData(TokensConfig):
    """Its batches have no `supervised`."""

    def batch_spec(self, seq_len):
        """The columns of the tokens."""
        return BatchSpec(UnscoredBatch.of, token_columns(hax.Axis(POSITION, seq_len)))


@dataclass(frozen=True)
class GradedLoss(ObjectiveConfig):
    """Next-token loss weighted by grade and age."""

    facts = ObjectiveFacts(batch_types=(GradedBatch, UnscoredBatch))

    def weights(self, batch):
        """The sum of the weights."""
        return NextToken().weights(self._weighted(batch))

    def terms(self, model, batch, slot, *, key):
        """The loss of the weighted tokens."""
        return NextToken().terms(model, self._weighted(batch), slot, key=key)

    def _weighted(self, batch):
        return replace(batch.sequences, loss_mask=batch.sequences.loss_mask * batch.grade * batch.age)
