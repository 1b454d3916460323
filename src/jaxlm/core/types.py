"""The values that travel between the parts: sums with their weights, token batches, what a step reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
import jax.numpy as jnp


class Sum(eqx.Module):
    """A total and the weight that it is a total over.

    Losses and metrics stay sums until the last moment, because sums of micro-batches, masked rows and devices add up
    exactly and means do not.

    Attributes:
        total: scalar float32, the weighted sum.
        weight: scalar float32, what to divide by.
    """

    total: jax.Array
    weight: jax.Array

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total, self.weight + other.weight)

    def mean(self) -> jax.Array:
        """total / weight, and 0 where the weight is 0."""
        return self.total / jnp.where(self.weight == 0, 1.0, self.weight)


class TokenBatch(eqx.Module):
    """Packed token windows. Every field has the axes {[microbatch,] batch, position}.

    Attributes:
        tokens: int32, the inputs.
        targets: int32, the token that follows each input.
        loss_mask: float32, 1 where the target counts; 0 on padding and where the target belongs to another document.
        segment_ids: int32, one number a document within its row, from 1; 0 is padding.
        positions: int32, position within the document (within the row for a document that began in an earlier row).
    """

    tokens: hax.NamedArray
    targets: hax.NamedArray
    loss_mask: hax.NamedArray
    segment_ids: hax.NamedArray
    positions: hax.NamedArray


@dataclass(frozen=True)
class Histogram:
    """Counts of an array's numbers in equal bins.

    Attributes:
        low, high: the ends of the first and the last bin: the least and the greatest number.
        counts: from low to high.
    """

    low: float
    high: float
    counts: tuple[int, ...]

    @property
    def edges(self) -> tuple[float, ...]:
        """Of the bins, one more than there are; a histogram of equal numbers is 1 wide."""
        width = (self.high - self.low if self.high > self.low else 1.0) / len(self.counts)
        return tuple(self.low + width * number for number in range(len(self.counts) + 1))

    @property
    def is_empty(self) -> bool:
        """Whether none of the numbers was finite: there are no ends then."""
        return not any(self.counts)


@dataclass(frozen=True)
class StepInfo:
    """What one finished step reports to the hooks.

    Attributes:
        step: updates done in the whole run, this one included (`step-N` = N).
        phase: the phase's name.
        metrics: plain Python numbers by metric name.
        histograms: by name, of the arrays that are watched.
    """

    step: int
    phase: str
    metrics: Mapping[str, float]
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
