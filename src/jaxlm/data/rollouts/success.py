"""A curriculum that samples less for prompts that the policy always or never solves, because nothing is learned from them.

Source: the prioritized sampling of Kimi k1.5 (Kimi Team 2025, arXiv:2501.12599, section 2.3), with prime-rl's two shares of
easy and hard prompts instead of a weight that is proportional to the rate.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import BelowOne, Fraction
from jaxlm.data.rollouts.curriculum import Curriculum, CurriculumConfig, CurriculumContext, PromptNumbers
from jaxlm.data.rollouts.rollout import packed, unpacked
from jaxlm.reading.choices import choice

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

    solved_at: float = 1.0
    easy: Fraction = 1.0
    hard: Fraction = 0.0
    easy_share: Share = 0.1
    hard_share: Share = 0.5
    momentum: BelowOne = 0.5

    def check(self) -> None:
        if self.hard >= self.easy:
            raise ConfigError(
                f"data.curriculum.hard: {self.hard}, less than easy ({self.easy}) expected: a prompt is not both"
            )

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
