"""A penalty for long completions.

Source: Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning system at scale" (arXiv:2503.14476), equation 13.
"""

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.reading.choices import choice
from jaxlm.rewards.base import Reward, RewardConfig, RewardContext, ScoredRows


@choice(RewardConfig, "length")
class LengthPenaltyConfig(RewardConfig):
    """0 for completions up to a length, then falls linearly to -1 at the maximum length, and stays there.

    Attributes:
        max_tokens: length at which the penalty is -1, in tokens with the end-of-sequence token (DAPO's `L_max`). Null takes
            `max_new_tokens`.
        cache_tokens: over how many tokens before that it falls (DAPO's `L_cache`). Null takes all of them: a penalty
            proportional to the length.
    """

    max_tokens: PositiveInt | None = None
    cache_tokens: PositiveInt | None = None

    def check(self) -> None:
        if self.max_tokens is not None:
            self._check_cache(self.max_tokens)

    def open(self, context: RewardContext) -> Reward:
        longest = self.max_tokens or context.max_new_tokens
        self._check_cache(longest)
        return LengthPenalty(longest, self.cache_tokens or longest)

    def _check_cache(self, longest: int) -> None:
        if self.cache_tokens is not None and self.cache_tokens > longest:
            raise ConfigError(
                f"reward of type length: cache_tokens: {self.cache_tokens} given, at most {longest} expected, which is the"
                " maximum length"
            )


class LengthPenalty(Reward):
    """Counts tokens."""

    def __init__(self, max_tokens: int, cache_tokens: int):
        self._max_tokens, self._cache_tokens = max_tokens, cache_tokens

    def score(self, rows: ScoredRows) -> list[float | None]:
        free = self._max_tokens - self._cache_tokens
        return [-min(max((len(ids) - free) / self._cache_tokens, 0.0), 1.0) for ids in rows.completion_ids]
