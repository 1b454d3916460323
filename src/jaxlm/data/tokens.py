"""The open data of a phase: packed sequences, and the order in which they are trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxlm.core.batch_schedule import BatchSchedule
from jaxlm.core.errors import ConfigError
from jaxlm.data.mixture import Mixture, MixtureStage
from jaxlm.data.packing import PackedSequences
from jaxlm.data.shuffle import Shuffle
from jaxlm.data.sources.named import NamedSource
from jaxlm.data.train_weights import WeightStage, block_counts

StopStrategy = Literal["restart", "first_exhausted", "all_exhausted"]


@dataclass(frozen=True)
class ValidationData:
    """The validation data of a source."""

    source: NamedSource
    sequences: PackedSequences


@dataclass(frozen=True)
class TokenData:
    """The open data of a phase.

    Attributes:
        train: source name -> training sequences.
        validation: validation data, one entry per source that has any.
        weights: sampling weights of the sources in `train`, by step of the phase; empty for a single source.
        block_size: examples in a block of the mixture; within each block the proportions are exact.
        shuffle: how each source's sequences are ordered.
        stop_strategy: when the data ends.
    """

    train: Mapping[str, PackedSequences]
    validation: tuple[ValidationData, ...]
    weights: Sequence[WeightStage]
    block_size: int
    shuffle: Shuffle
    stop_strategy: StopStrategy

    def examples(self, batches: BatchSchedule, *, seed: int) -> Mixture:
        """The training examples in the order determined by `seed`. Args: batches: batch sizes by step of the phase."""
        return Mixture(self.train, self._stages(batches), seed=seed, shuffle=self.shuffle)

    def num_examples(self, batches: BatchSchedule, *, seed: int) -> int | None:
        """Number of training examples until `stop_strategy` ends the data; None if it never does.

        Raises:
            ConfigError: `stop_strategy` is `all_exhausted`, but some source is never exhausted.
        """
        if self.stop_strategy == "restart":
            return None
        ends = self.examples(batches, seed=seed).exhausted_after()
        never = [name for name, end in zip(self.train, ends, strict=True) if end is None]
        if self.stop_strategy == "first_exhausted":
            return min((end for end in ends if end is not None), default=None)
        if never:
            raise ConfigError(
                f"data.stop_strategy: all_exhausted given, but with these train_weights {', '.join(never)} would never be"
                " exhausted. Give it a weight above 0 in the last stage, or choose another stop_strategy"
            )
        return max(end for end in ends if end is not None)

    def _stages(self, batches: BatchSchedule) -> list[MixtureStage]:
        names = list(self.train)
        if len(names) == 1:
            return [MixtureStage(0, (1,))]
        starts = [batches.examples_before(stage.step) for stage in self.weights]
        counts = [block_counts(stage.weights, names, self.block_size) for stage in self.weights]
        return [MixtureStage(*stage) for stage in zip(starts, counts, strict=True)]
