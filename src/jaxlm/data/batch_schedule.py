"""The batch size as a function of the step.

step       0 ..........  999 | 1000 ..........
sequences  32 per step       | 64 per step
examples   0 ....... 31,999  | 32,000 ........     a step's examples are computed without running earlier steps
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxlm.core.field_types import NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class BatchSize:
    """A batch size and the step at which it starts.

    Attributes:
        start: first step with this size, counted from 0 over the whole run.
        value: sequences per step, over all devices.
    """

    start: NonNegativeInt
    value: PositiveInt


@dataclass(frozen=True)
class BatchStage:
    """Consecutive steps with the same batch shape.

    Attributes:
        start: first step, counted from 0.
        size: sequences per step. Empty sequences pad the microbatches if they do not fill them.
        num_microbatches: microbatches per step, processed one after another.
        microbatch: sequences per microbatch, over all devices.
    """

    start: int
    size: int
    num_microbatches: int
    microbatch: int

    @property
    def shape(self) -> tuple[int, int]:
        """(microbatches, sequences per microbatch). Each shape needs its own compiled program."""
        return self.num_microbatches, self.microbatch


@dataclass(frozen=True)
class BatchSchedule:
    """Batch sizes of all steps, as stages in order. The first stage starts at step 0."""

    stages: tuple[BatchStage, ...]

    @staticmethod
    def of(sizes: Sequence[BatchSize]) -> "BatchSchedule":
        """A schedule in which each batch is one microbatch."""
        return BatchSchedule(tuple(BatchStage(one.start, one.value, 1, one.value) for one in sizes))

    @property
    def first(self) -> BatchStage:
        return self.stages[0]

    @property
    def largest(self) -> BatchStage:
        """The stage with the most sequences per step."""
        return max(self.stages, key=lambda stage: stage.size)

    def at(self, step: int) -> BatchStage:
        """The stage of a step (from 0)."""
        return next(stage for stage in reversed(self.stages) if stage.start <= step)

    def between(self, step: int, end: int) -> tuple[BatchStage, ...]:
        """The stages of steps `step` to `end` (exclusive)."""
        return (self.at(step), *(stage for stage in self.stages if step < stage.start < end))

    def next_shape_change(self, step: int, end: int) -> int:
        """The first step after `step` with another batch shape, or `end` if there is none before it."""
        current, *later = self.between(step, end)
        return next((stage.start for stage in later if stage.shape != current.shape), end)

    def examples_before(self, step: int) -> int:
        """Total number of sequences in all steps before `step`, without padding."""
        ends = [*(stage.start for stage in self.stages[1:]), step]
        spans = zip(self.stages, ends, strict=True)
        return sum(stage.size * max(0, min(end, step) - stage.start) for stage, end in spans)

    def examples_between(self, step: int, end: int) -> int:
        """Total number of sequences in steps `step` to `end` (exclusive), without padding."""
        return self.examples_before(end) - self.examples_before(step)

    def whole_steps(self, examples: int) -> int:
        """Number of complete steps in this many sequences."""
        stage = next(s for s in reversed(self.stages) if self.examples_before(s.start) <= examples)
        return stage.start + (examples - self.examples_before(stage.start)) // stage.size

    def steps_for(self, examples: int) -> int:
        """Number of steps needed to read this many sequences. The last batch may read more."""
        steps = self.whole_steps(examples)
        return steps + (self.examples_before(steps) < examples)

    def starting_at(self, step: int) -> "BatchSchedule":
        """The schedule from `step` on, with `step` renumbered to 0."""
        later = (replace(stage, start=stage.start - step) for stage in self.stages if stage.start > step)
        return BatchSchedule((replace(self.at(step), start=0), *later))
