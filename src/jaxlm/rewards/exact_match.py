"""A reward for the completion whose answer is the reference answer of its record."""

import re
from collections.abc import Iterator
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.reading.choices import choice
from jaxlm.rewards.base import Reward, RewardConfig, RewardContext, ScoredRows, compiled_pattern


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The first group of the last match, or the whole match if the pattern has no group; None if nothing matches."""
    last = None
    for match in pattern.finditer(text):
        last = match
    return None if last is None else last[1 if pattern.groups else 0]


@choice(RewardConfig, "exact_match")
class ExactMatchConfig(RewardConfig):
    """1 if the completion's answer is the reference answer of its record, 0 if not. White space around both is ignored.

    Attributes:
        column: key of the record with the reference: a text, a number, or a list of them, one of which must match. The
            reward does not apply where it is null.
        pattern: regular expression that finds the answer in the completion: the first group of its last match. Without a
            match, the reward is 0. Null compares the whole completion.
        reference_pattern: the same for the reference, in which it must match.
        ignore_case: compare without regard to case.
    """

    column: str = "answer"
    pattern: str | None = None
    reference_pattern: str | None = None
    ignore_case: bool = False

    def check(self) -> None:
        for name in ("pattern", "reference_pattern"):
            if (pattern := getattr(self, name)) is not None:
                compiled_pattern(pattern, f"reward of type exact_match: {name}")

    def open(self, context: RewardContext) -> Reward:
        return ExactMatch(self)


class ExactMatch(Reward):
    """Compares texts."""

    def __init__(self, config: ExactMatchConfig):
        self._config = config
        self._pattern = None if config.pattern is None else re.compile(config.pattern)
        self._of_reference = None if config.reference_pattern is None else re.compile(config.reference_pattern)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self._config.column,)

    def score(self, rows: ScoredRows) -> list[float | None]:
        pairs = zip(rows.completions, rows.columns[self._config.column], strict=True)
        return [self._score(completion, reference) for completion, reference in pairs]

    def _score(self, completion: str, reference: Any) -> float | None:
        if reference is None:
            return None
        accepted = {self._plain(text) for text in self._references(reference)}
        answer = completion if self._pattern is None else last_match(self._pattern, completion)
        return float(answer is not None and self._plain(answer) in accepted)

    def _references(self, reference: Any) -> Iterator[str]:
        for one in reference if isinstance(reference, list) else [reference]:
            text = str(one)
            match = text if self._of_reference is None else last_match(self._of_reference, text)
            if match is None:
                raise ConfigError(
                    f"reference_pattern: '{self._config.reference_pattern}' does not match the reference"
                    f" '{text[-80:]}' in the column '{self._config.column}'"
                )
            yield match

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self._config.ignore_case else text.strip()
