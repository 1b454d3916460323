"""Chooses for which of the prompts, in the order of training, responses are sampled (curricula).

`Difficulty` goes from easy to hard prompts, by a column of their records. `Success` samples less for prompts that the
policy always or never solves, because nothing is learned from them.

Source: `Difficulty`: competence-based curriculum learning (Platanios et al. 2019, arXiv:1903.09848, section 3), with its
linear competence. `Success`: the prioritized sampling of Kimi k1.5 (Kimi Team 2025, arXiv:2501.12599, section 2.3), with
prime-rl's two shares of easy and hard prompts instead of a weight that is proportional to the rate.
"""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

import draccus
import numpy as np
from annotated_types import Interval

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import BelowOne, Fraction, PositiveFraction, PositiveInt
from jaxlm.core.rules import Rules, ordered
from jaxlm.data.mixture import Mixture
from jaxlm.reading.choices import Registry, choice
from jaxlm.systems.rl.rollout import packed, unpacked

_LOOKED_AT = 64  # prompts at a time
_MOST_EPOCHS = 200  # without an accepted prompt; far more than the smallest share that a member allows makes likely


class PromptNumbers(NamedTuple):
    """Says which prompts these are, int64 [prompts] each.

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
    """Holds what a curriculum may need of the run.

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
        """Returns what is logged of it, by name."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns what it has learned, as plain JSON, exact."""

    @abc.abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state` returned, or from the beginning if that is empty."""


@dataclass(frozen=True)
class CurriculumConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """Decides which prompts are sampled for, and when."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys that must have a number in every record."""
        return ()

    def check(self) -> None:
        """Raises `ConfigError` if a key cannot work."""
        return

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
        """Returns what is logged. Args: num_passed_over: prompts for which the rollout of a step has not sampled."""
        if self.curriculum is None:
            return {}
        metrics = {"passed_over": float(num_passed_over), **self.curriculum.metrics(step)}
        return {f"curriculum/{name}": value for name, value in metrics.items()}

    def _numbers(self, examples: np.ndarray) -> PromptNumbers:
        return PromptNumbers(examples, *self._mixture.find(examples))


_FIRST = 0.1


@choice(CurriculumConfig, "difficulty")
class DifficultyConfig(CurriculumConfig):
    """Begins with the easiest prompts, and adds harder ones step by step.

    Attributes:
        column: key of the records with a number, the larger the harder.
        first_share: the share of the prompts, the easiest ones, that training begins with. Equally hard ones count together.
        full_after: number of steps of the phase after which all prompts are in use, such as half of it. Until then, their
            share grows evenly.
        hardest_first: begin with the largest numbers instead.
    """

    column: str = "difficulty"
    first_share: PositiveFraction = _FIRST
    full_after: PositiveInt = field(kw_only=True)
    hardest_first: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def open(self, context: CurriculumContext) -> Curriculum:
        sign = -1.0 if self.hardest_first else 1.0
        values = [sign * of_source for of_source in context.values(self.column)]
        return Difficulty(values, self.first_share, self.full_after, context.first_step)


class Difficulty(Curriculum):
    """Accepts a prompt if it is not harder than the others in use. It has no memory."""

    def __init__(self, values: list[np.ndarray], first_share: float, full_after: int, first_step: int):
        """Args: values: of each source, float64 [prompts]."""
        self._values, self._sorted = values, np.sort(np.concatenate(values))
        self._first_share, self._full_after, self._first_step = first_share, full_after, first_step

    def accepts(self, prompts: PromptNumbers, step: int) -> np.ndarray:
        hardest = self._hardest(step)
        mask = np.zeros(len(prompts.examples), bool)
        for source in np.unique(prompts.sources).tolist():
            of_source = prompts.sources == source
            mask[of_source] = self._values[source][prompts.indices[of_source]] <= hardest
        return mask

    def learn(self, prompts: PromptNumbers, rewards: np.ndarray) -> None:
        return

    def metrics(self, step: int) -> Mapping[str, float]:
        return {"share": float(np.mean(self._sorted <= self._hardest(step)))}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        return

    def _hardest(self, step: int) -> float:
        """The largest value in use."""
        grown = min(1.0, (step - self._first_step) / self._full_after)
        share = self._first_share + (1 - self._first_share) * grown
        return self._sorted[min(len(self._sorted), max(1, math.ceil(share * len(self._sorted)))) - 1]


Share = Annotated[float, Interval(ge=0.01, le=1)]


@choice(CurriculumConfig, "success")
class SuccessConfig(CurriculumConfig):
    """Passes over some of the prompts that are always or never solved, by what it has seen of each of them. A prompt that has
    not been sampled for is always accepted.

    Attributes:
        solved_at: a response solves its prompt if its reward is at least this.
        easy: a prompt is easy if its responses solve it at this rate or more often.
        hard: a prompt is hard if they solve it at this rate or less often.
        easy_share: how often an easy prompt is accepted when it is its turn.
        hard_share: how often a hard one is.
        momentum: how much a prompt's rate keeps of its old value when it is sampled for again.
    """

    key_rules: ClassVar[Rules] = (ordered("hard", "easy", strictly=True, why="and a prompt is not both"),)

    solved_at: float = 1.0
    easy: Fraction = 1.0
    hard: Fraction = 0.0
    easy_share: Share = 0.1
    hard_share: Share = 0.5
    momentum: BelowOne = 0.5

    def open(self, context: CurriculumContext) -> Curriculum:
        return Success(self, context.seed, context.sources)


class Success(Curriculum):
    """Remembers how often each prompt was solved."""

    def __init__(self, config: SuccessConfig, seed: int, sources: Sequence[str]):
        self._config, self._seed, self._sources = config, seed, list(sources)
        self._rates: dict[tuple[int, int], float] = {}  # (source, index) -> rate

    def accepts(self, prompts: PromptNumbers, step: int) -> np.ndarray:
        rows = zip(*(column.tolist() for column in prompts), strict=True)
        return np.array([self._accepts(example, (source, index)) for example, source, index in rows], bool)

    def learn(self, prompts: PromptNumbers, rewards: np.ndarray) -> None:
        momentum, solved = self._config.momentum, (rewards >= self._config.solved_at).mean(axis=1)
        for source, index, rate in zip(
            prompts.sources.tolist(), prompts.indices.tolist(), solved.tolist(), strict=True
        ):
            before = self._rates.get((source, index))
            self._rates[source, index] = rate if before is None else momentum * before + (1 - momentum) * rate

    def metrics(self, step: int) -> Mapping[str, float]:
        rates = np.array(list(self._rates.values()))
        if not len(rates):
            return {}
        return {
            "num_seen": float(len(rates)),
            "frac_easy": float(np.mean(rates >= self._config.easy)),
            "frac_hard": float(np.mean(rates <= self._config.hard)),
        }

    def state(self) -> dict[str, Any]:
        numbers = np.array(list(self._rates), np.int64).reshape(-1, 2)
        rates = np.array(list(self._rates.values()), np.float64)
        return {"sources": self._sources, "prompts": packed(numbers), "rates": packed(rates)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rates = {}
        if "rates" in state:
            numbers = unpacked(state["prompts"], np.int64).reshape(-1, 2).tolist()
            rates = unpacked(state["rates"], np.float64).tolist()
            # `trainer.allow_changes: [data]` may have removed or reordered sources.
            now = {
                number: self._sources.index(name)
                for number, name in enumerate(state["sources"])
                if name in self._sources
            }
            known = (
                (source, index, rate) for (source, index), rate in zip(numbers, rates, strict=True) if source in now
            )
            self._rates = {(now[source], index): rate for source, index, rate in known}

    def _accepts(self, example: int, prompt: tuple[int, int]) -> bool:
        rate, config = self._rates.get(prompt), self._config
        if rate is None or config.hard < rate < config.easy:
            return True
        share = config.easy_share if rate >= config.easy else config.hard_share
        # Of the number in the order of training, so that it is drawn anew in each epoch, and equally after a resume.
        return float(np.random.default_rng((self._seed, example)).random()) < share
