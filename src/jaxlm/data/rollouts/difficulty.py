"""A curriculum from easy to hard prompts, by a column of their records.

Source: competence-based curriculum learning (Platanios et al. 2019, arXiv:1903.09848, section 3), with its linear competence.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveFraction, PositiveInt
from jaxlm.data.rollouts.curriculum import Curriculum, CurriculumConfig, CurriculumContext, PromptNumbers
from jaxlm.reading.choices import choice

_FIRST = 0.1


@choice(CurriculumConfig, "difficulty")
class DifficultyConfig(CurriculumConfig):
    """Begins with the easiest prompts, and adds harder ones step by step.

    Attributes:
        column: key of the records with a number, the larger the harder.
        first_share: the share of the prompts, the easiest ones, that training begins with. Equally hard ones count together.
        full_after: number of steps of the phase after which all prompts are in use. Until then, their share grows evenly.
        hardest_first: begin with the largest numbers instead.
    """

    column: str = "difficulty"
    first_share: PositiveFraction = _FIRST
    full_after: PositiveInt | None = None
    hardest_first: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def check(self) -> None:
        if self.full_after is None:
            raise ConfigError(
                "data.curriculum.full_after: missing. Set it to the number of steps after which all prompts are in use, such"
                " as half of the phase"
            )

    def open(self, context: CurriculumContext) -> Curriculum:
        assert self.full_after is not None, "see check"
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
