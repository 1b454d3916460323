"""How large each step's batch is: a function of the step's number.

step       0 ..........  999 | 1000 ..........
sequences  32 a step         | 64 a step
examples   0 ....... 31,999  | 32,000 ........     what a step reads is found without the steps before it
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BatchSize:
    """A batch size, and when it begins.

    Attributes:
        start: the first step that has it, counted from 0 over the whole run.
        value: sequences a step, over all devices.
    """

    start: int
    value: int


@dataclass(frozen=True)
class BatchStage:
    """Steps with batches of one shape.

    Attributes:
        start: the first of them, from 0.
        size: sequences a step. Where they do not fill the micro-batches, empty ones do.
        num_microbatches: parts that the step works on one after another.
        microbatch: sequences of one part, over all devices.
    """

    start: int
    size: int
    num_microbatches: int
    microbatch: int

    @property
    def shape(self) -> tuple[int, int]:
        """(micro-batches, sequences of one): what a program is compiled for."""
        return self.num_microbatches, self.microbatch


@dataclass(frozen=True)
class BatchSchedule:
    """The batches of all steps.

    Attributes:
        stages: by their starts, the first at 0.
    """

    stages: tuple[BatchStage, ...]

    @staticmethod
    def of(sizes: Sequence[BatchSize]) -> "BatchSchedule":
        """Of batches that nothing divides."""
        return BatchSchedule(tuple(BatchStage(one.start, one.value, 1, one.value) for one in sizes))

    @staticmethod
    def constant(size: int) -> "BatchSchedule":
        """Batches that are all of one size, and that nothing divides."""
        return BatchSchedule.of([BatchSize(0, size)])

    @property
    def first(self) -> BatchStage:
        """Where it begins."""
        return self.stages[0]

    @property
    def largest(self) -> BatchStage:
        """The stage with the most sequences a step."""
        return max(self.stages, key=lambda stage: stage.size)

    def at(self, step: int) -> BatchStage:
        """The stage that a step (from 0) is in."""
        return next(stage for stage in reversed(self.stages) if stage.start <= step)

    def between(self, step: int, end: int) -> tuple[BatchStage, ...]:
        """The stages of the steps from `step` on and below `end`."""
        return (self.at(step), *(stage for stage in self.stages if step < stage.start < end))

    def same_until(self, step: int, end: int) -> int:
        """The first step behind this one with batches of another shape; `end` where none comes before it."""
        here, *later = self.between(step, end)
        return next((stage.start for stage in later if stage.shape != here.shape), end)

    def examples_before(self, step: int) -> int:
        """Sequences that all steps before this one take together, those that only fill up not counted."""
        ends = [*(stage.start for stage in self.stages[1:]), step]
        spans = zip(self.stages, ends, strict=True)
        return sum(stage.size * max(0, min(end, step) - stage.start) for stage, end in spans)

    def examples_between(self, step: int, end: int) -> int:
        """The same of the steps from `step` on and below `end`."""
        return self.examples_before(end) - self.examples_before(step)

    def whole_steps(self, examples: int) -> int:
        """How many steps so many sequences are enough for."""
        stage = next(s for s in reversed(self.stages) if self.examples_before(s.start) <= examples)
        return stage.start + (examples - self.examples_before(stage.start)) // stage.size

    def steps_for(self, examples: int) -> int:
        """How many steps it takes until so many sequences have been read; the last batch may reach beyond them."""
        steps = self.whole_steps(examples)
        return steps + (self.examples_before(steps) < examples)

    def counted_from(self, step: int) -> "BatchSchedule":
        """The same from a step on, which then is step 0."""
        later = (stage for stage in self.stages if stage.start > step)
        return BatchSchedule(
            (replace(self.at(step), start=0), *(replace(stage, start=stage.start - step) for stage in later))
        )
