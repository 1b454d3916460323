"""A reward for completions that match a regular expression."""

import re

from jaxlm.reading.choices import choice
from jaxlm.rewards.base import Reward, RewardConfig, RewardContext, ScoredRows, compiled_pattern


@choice(RewardConfig, "format")
class FormatRewardConfig(RewardConfig):
    """1 if the whole completion matches a regular expression, 0 if not.

    Attributes:
        pattern: the regular expression. Its `.` also matches line ends.
    """

    pattern: str

    def check(self) -> None:
        compiled_pattern(self.pattern, "reward of type format: pattern")

    def open(self, context: RewardContext) -> Reward:
        return FormatReward(re.compile(self.pattern, re.DOTALL))


class FormatReward(Reward):
    """Matches texts."""

    def __init__(self, pattern: re.Pattern[str]):
        self._pattern = pattern

    def score(self, rows: ScoredRows) -> list[float | None]:
        return [float(self._pattern.fullmatch(text) is not None) for text in rows.completions]
