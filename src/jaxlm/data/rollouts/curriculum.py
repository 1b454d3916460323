"""The interface of curricula: for which of the prompts, in the order of training, responses are sampled."""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.data.mixture import Mixture
from jaxlm.reading.choices import Registry

_LOOKED_AT = 64  # prompts at a time
_MOST_EPOCHS = 200  # without an accepted prompt; far more than the smallest share that a member allows makes likely


class PromptNumbers(NamedTuple):
    """Which prompts these are, int64 [prompts] each.

    Attributes:
        examples: the number in the order of training. A prompt has another one in each epoch.
        sources: the number of the source.
        indices: the number among the prompts of the source.
    """

    examples: np.ndarray
    sources: np.ndarray
    indices: np.ndarray


@dataclass(frozen=True)
class CurriculumContext:
    """What a curriculum may need of the run.

    Attributes:
        seed: of the order of the training data.
        first_step: of the phase.
        sources: their names, by number.
        values: key of the records -> its values for all prompts of each source, in float64. Raises `ConfigError` if a record
            has no number there.
    """

    seed: int
    first_step: int
    sources: Sequence[str]
    values: Callable[[str], Sequence[np.ndarray]]


class Curriculum(abc.ABC):
    """Accepts prompts or passes over them. All processes ask it the same, in the same order, and get the same answers."""

    @abc.abstractmethod
    def accepts(self, prompts: PromptNumbers, step: int) -> np.ndarray:
        """bool [prompts]: whether responses to them are sampled at a step, when it is their turn."""

    @abc.abstractmethod
    def learn(self, prompts: PromptNumbers, rewards: np.ndarray) -> None:
        """Hears what responses were worth. Args: rewards: float64 [prompts, group]."""

    @abc.abstractmethod
    def metrics(self, step: int) -> Mapping[str, float]:
        """What is logged of it, by name."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """What it has learned, as plain JSON, exact."""

    @abc.abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state` returned, or from the beginning if that is empty."""


@dataclass(frozen=True)
class CurriculumConfig(Registry, abc.ABC):
    """Which prompts are sampled for, and when."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys that must have a number in every record."""
        return ()

    @abc.abstractmethod
    def check(self) -> None:
        """Raises `ConfigError` if a key cannot work."""

    @abc.abstractmethod
    def open(self, context: CurriculumContext) -> Curriculum:
        """Opens the curriculum, on every process."""


class PromptOrder:
    """The training prompts in the order of the mixture, without those that the curriculum passes over."""

    def __init__(self, mixture: Mixture, curriculum: Curriculum | None):
        self.curriculum = curriculum
        self._mixture = mixture
        num_prompts = sum(len(mixture.examples_of(number)) for number in range(len(mixture.names)))
        self._most_passed_over = _MOST_EPOCHS * (num_prompts + _LOOKED_AT)

    def take(self, first: int, count: int, step: int) -> tuple[np.ndarray, int]:
        """The next prompts from number `first` on, int64 [count], and the number of the one after them."""
        if self.curriculum is None:
            return first + np.arange(count), first + count
        numbers: list[int] = []
        at = first
        while len(numbers) < count:
            looked_at = at + np.arange(max(count, _LOOKED_AT))
            accepted = looked_at[self.curriculum.accepts(self._numbers(looked_at), step)].tolist()
            at = int(looked_at[-1]) + 1
            if len(accepted) >= count - len(numbers):
                accepted = accepted[: count - len(numbers)]
                at = accepted[-1] + 1
            numbers += accepted
            if at - (numbers[-1] if numbers else first) > self._most_passed_over:
                raise ConfigError(
                    f"data.curriculum: at step {step}, it accepts none of {self._most_passed_over:,} prompts in turn. With"
                    " data.train_weights, the sources of the accepted prompts may have a weight of 0. Change one of them"
                )
        return np.array(numbers, np.int64), at

    def learn(self, examples: np.ndarray, rewards: np.ndarray) -> None:
        """Tells the curriculum what the responses to some prompts were worth. Args: rewards: float64 [prompts, group]."""
        if self.curriculum is not None:
            self.curriculum.learn(self._numbers(examples), rewards)

    def metrics(self, step: int, num_passed_over: int) -> dict[str, float]:
        """What is logged. Args: num_passed_over: prompts for which the rollout of a step has not sampled."""
        if self.curriculum is None:
            return {}
        metrics = {"passed_over": float(num_passed_over), **self.curriculum.metrics(step)}
        return {f"curriculum/{name}": value for name, value in metrics.items()}

    def _numbers(self, examples: np.ndarray) -> PromptNumbers:
        return PromptNumbers(examples, *self._mixture.find(examples))
