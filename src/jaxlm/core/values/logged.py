"""What is logged of a step, and of the texts that a run generates."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
