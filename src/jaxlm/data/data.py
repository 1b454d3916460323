"""The open data of a phase: its examples, the order in which they are trained on, and their batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from haliax import Axis

from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout
from jaxlm.data.base import VALIDATION, Batches
from jaxlm.data.batch import BatchSpec, Column, Columns
from jaxlm.data.batch_schedule import BatchSchedule
from jaxlm.data.cache.token_cache import Provenance
from jaxlm.data.examples import ExampleRange, Examples
from jaxlm.data.loader import BatchContext, BatchMaker, BatchReader, RunServices, eval_batches, example_batches
from jaxlm.data.mixture import Mixture, MixtureStage, WeightStage, block_counts
from jaxlm.data.shuffle import EraShuffle, Shuffle
from jaxlm.data.sources.named import NamedSource

StopStrategy = Literal["restart", "first_exhausted", "all_exhausted"]


@dataclass(frozen=True)
class ValidationData:
    """The validation data of a source. It may be held out of the training split."""

    source: NamedSource
    examples: Examples
    spec: BatchSpec[Any]
    split: str = VALIDATION

    def batches(self, *, batch_size: int, layout: Layout, max_batches: int | None) -> Iterator[Any]:
        """One pass over the examples in order, as batches {batch, ...}."""
        return eval_batches(self.examples, self.spec, batch_size=batch_size, layout=layout, max_batches=max_batches)

    def batches_by_group(
        self, groups: Provenance, *, batch_size: int, layout: Layout, max_batches: int | None
    ) -> Iterator[tuple[Any, jax.Array]]:
        """`batches`, each with the number of every target's group in the order of the text, int32 [batch, position]."""
        Position = Axis(POSITION, self.examples.seq_len)
        last = self.examples.num_evaluated(None if max_batches is None else max_batches * batch_size) - 1
        spec = BatchSpec(lambda group: group.array, {"group": Column(np.int32, (Position,))})
        batches = self.batches(batch_size=batch_size, layout=layout, max_batches=max_batches)
        for number, batch in enumerate(batches):

            def read(rows: np.ndarray, first: int = number * batch_size) -> Columns:
                return {"group": groups.of(self.examples.target_positions(np.minimum(first + rows, last)))}

            yield batch, spec.assemble(read, (Axis(BATCH, batch_size),), layout)


@dataclass(frozen=True)
class Data:
    """The open data of a phase.

    Attributes:
        train: source name -> training examples.
        spec: the shapes of their batches.
        validation: validation data, one entry per source that has any.
        weights: sampling weights of the sources in `train`, by step of the phase; empty for a single source.
        block_size: examples in a block of the mixture; within each block the proportions are exact.
        shuffle: how each source's examples are ordered.
        stop_strategy: when the data ends.
        has_examples_per_step: whether each step reads as many new examples as its batch has.
        max_train_batches: source name -> batches of the first size, whose number of examples is all that is trained on.
        make_batches: what makes the batches of the examples.
    """

    train: Mapping[str, Examples]
    spec: BatchSpec[Any]
    validation: tuple[ValidationData, ...]
    weights: Sequence[WeightStage]
    block_size: int
    shuffle: Shuffle
    stop_strategy: StopStrategy
    max_train_batches: Mapping[str, int] = field(default_factory=dict)
    make_batches: BatchMaker = example_batches
    has_examples_per_step: bool = True

    def batches(
        self,
        schedule: BatchSchedule,
        layout: Layout,
        *,
        start: int,
        first_step: int,
        seed: int,
        services: RunServices | None = None,
    ) -> Batches:
        """The training batches, in the order determined by `seed`.

        Args:
            schedule: batch sizes by step of the run.
            start: first step of the phase.
            first_step: step that the first batch belongs to.
            services: of the run, for batches that ask the model.
        """
        mixture = self.mixture(schedule.starting_at(start), seed=seed)
        reader = BatchReader(mixture, self.spec, schedule, layout)
        return self.make_batches(reader, BatchContext(start, first_step, seed, services or RunServices()))

    def mixture(self, batches: BatchSchedule, *, seed: int) -> Mixture:
        """The training examples in the order determined by `seed`. Args: batches: batch sizes by step of the phase."""
        return Mixture(self.trained_on(batches), self._stages(batches), seed=seed, shuffle=self.shuffle)

    def trained_on(self, batches: BatchSchedule) -> dict[str, Examples]:
        """Source name -> the training examples that `max_train_batches` leaves. Args: batches: as in `mixture`."""
        left = dict(self.train)
        for name, num_batches in self.max_train_batches.items():
            size, available = num_batches * batches.first.size, len(left[name])
            if size > available:
                raise ConfigError(
                    f"data.max_train_batches{f'.{name}' if name else ''}: {num_batches} batches of {batches.first.size}"
                    f" sequences given, but there are only {available:,} sequences. Give at most"
                    f" {available // batches.first.size}, or remove it"
                )
            left[name] = ExampleRange(left[name], 0, size)
        return left

    def num_examples(self, batches: BatchSchedule, *, seed: int) -> int | None:
        """Number of training examples until `stop_strategy` ends the data; None if it never does.

        Raises:
            ConfigError: `stop_strategy` is `all_exhausted`, but some source is never exhausted.
        """
        if self.stop_strategy == "restart":
            return None
        ends = self.mixture(batches, seed=seed).exhausted_after()
        never = [name for name, end in zip(self.train, ends, strict=True) if end is None]
        if self.stop_strategy == "first_exhausted":
            return min((end for end in ends if end is not None), default=None)
        if never:
            raise ConfigError(
                f"data.stop_strategy: all_exhausted given, but with these train_weights {', '.join(never)} would never be"
                " exhausted. Give it a weight above 0 in the last stage, or choose another stop_strategy"
            )
        return max(end for end in ends if end is not None)

    def slow_sources(self) -> list[str]:
        """A line for each training source that is read from a URL in an order for which the mirror is too small."""
        lines = []
        for name, examples in self.train.items():
            blocks, era = examples.cache.blocks, self.shuffle
            if blocks is None or not era:
                continue
            at_random = blocks.num_bytes
            if isinstance(era, EraShuffle):
                at_random = min(at_random, era.era_length * examples.seq_len * blocks.dtype.itemsize)
            if at_random > blocks.mirror.max_bytes:
                lines.append(
                    f"the training data{f' of {name}' if name else ''} is read in random order from {at_random / 1e9:.3g} GB"
                    f" at {blocks.url}, but only {blocks.mirror.max_bytes / 1e9:.3g} GB are kept here, so most sequences"
                    " download a block of their own. Raise data.cache_mirror_gb, or shuffle within shorter eras"
                    " (data.shuffle: {type: era, era_length: N})"
                )
        return lines

    def _stages(self, batches: BatchSchedule) -> list[MixtureStage]:
        names = list(self.train)
        if len(names) == 1:
            return [MixtureStage(0, (1,))]
        starts = [batches.examples_before(stage.step) for stage in self.weights]
        counts = [block_counts(stage.weights, names, self.block_size) for stage in self.weights]
        return [MixtureStage(*stage) for stage in zip(starts, counts, strict=True)]
