"""The open data of a phase: tokens cut into windows, and in which order they are trained on."""

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
    """What a source is evaluated on.

    Attributes:
        source: whose it is.
        windows: its validation tokens.
    """

    source: NamedSource
    windows: PackedSequences


@dataclass(frozen=True)
class TokenData:
    """The open data of a phase.

    Attributes:
        train: name -> windows to train on.
        validation: what to evaluate on, source by source.
        weights: of the sources in `train`, by the phase's steps; where there is one source, none are needed.
        block_size: examples in which each source has exactly its part.
        shuffle: how each source's windows are ordered.
        stop_strategy: when the data ends.
    """

    train: Mapping[str, PackedSequences]
    validation: tuple[ValidationData, ...]
    weights: Sequence[WeightStage]
    block_size: int
    shuffle: Shuffle
    stop_strategy: StopStrategy

    def examples(self, batches: BatchSchedule, *, seed: int) -> Mixture:
        """What to train on, in the order that the seed gives. Args: batches: by the phase's steps, as weights are."""
        return Mixture(self.train, self._stages(batches), seed=seed, shuffle=self.shuffle)

    def num_examples(self, batches: BatchSchedule, *, seed: int) -> int | None:
        """How many there are until `stop_strategy` ends them; None where it never does.

        Raises:
            ConfigError: all are to be exhausted, and some source never is.
        """
        if self.stop_strategy == "restart":
            return None
        ends = self.examples(batches, seed=seed).exhausted_after()
        never = [name for name, end in zip(self.train, ends, strict=True) if end is None]
        if self.stop_strategy == "first_exhausted":
            return min((end for end in ends if end is not None), default=None)
        if never:
            raise ConfigError(
                f"data.stop_strategy: all_exhausted, but with these train_weights {', '.join(never)} would never be read"
                " to the end. Give it weight in the last stage, or choose another stop_strategy"
            )
        return max(end for end in ends if end is not None)

    def _stages(self, batches: BatchSchedule) -> list[MixtureStage]:
        names = list(self.train)
        if len(names) == 1:
            return [MixtureStage(0, (1,))]
        starts = [batches.examples_before(stage.step) for stage in self.weights]
        counts = [block_counts(stage.weights, names, self.block_size) for stage in self.weights]
        return [MixtureStage(*stage) for stage in zip(starts, counts, strict=True)]
