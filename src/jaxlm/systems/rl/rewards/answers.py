"""Rewards by rule: equal answers, correct maths, a form, and a penalty for long completions.

Source: maths: Cobbe et al. 2021, "Training verifiers to solve math word problems" (arXiv:2110.14168), for GSM8K's `#### n`;
github.com/huggingface/Math-Verify for expressions. Length: Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning
system at scale" (arXiv:2503.14476), equation 13.
"""

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Literal

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.install import install_command
from jaxlm.core.rules import Rules, ordered
from jaxlm.core.values.logged import ScoredRows
from jaxlm.reading.choices import choice
from jaxlm.systems.rl.rewards.base import Reward, RewardConfig, RewardContext, compiled_pattern


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
        return ComparedAnswers(self.column, _ExactMatch(self))


class ComparedAnswers(Reward):
    """Compares each answer with the reference in its record."""

    def __init__(self, column: str, is_right: Callable[[str, Any], bool | None]):
        """Args: is_right: gets a completion and its reference; None if it cannot read the reference."""
        self._column, self._is_right = column, is_right

    @property
    def columns(self) -> tuple[str, ...]:
        return (self._column,)

    def score(self, rows: ScoredRows) -> list[float | None]:
        pairs = zip(rows.completions, rows.columns[self._column], strict=True)
        found = [None if reference is None else self._is_right(text, reference) for text, reference in pairs]
        return [None if is_right is None else float(is_right) for is_right in found]


class _ExactMatch:
    def __init__(self, config: ExactMatchConfig):
        self._config = config
        self._pattern = None if config.pattern is None else re.compile(config.pattern)
        self._of_reference = None if config.reference_pattern is None else re.compile(config.reference_pattern)

    def __call__(self, completion: str, reference: Any) -> bool:
        accepted = {self._plain(text) for text in self._references(reference)}
        answer = completion if self._pattern is None else last_match(self._pattern, completion)
        return answer is not None and self._plain(answer) in accepted

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


_MARK = "####"
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_LIBRARY = "math_verify"
_TIMEOUT_S = 5  # of one answer; an expression may take forever to simplify


@choice(RewardConfig, "math")
class MathRewardConfig(RewardConfig):
    """1 if the completion's final answer is equal to the reference as a mathematical object, 0 if not.

    Attributes:
        column: key of the record with the reference. The reward does not apply where it is null.
        notation: how answers are written. `gsm8k`: a number after `####`, in the completion and in the reference, which may
            also be a number alone; thousands separators, `$` and `%` do not count. `latex`: the completion's last `\\boxed{}`
            or other expression, compared by math-verify (the extra `math`); of the reference, what follows
            `####` if it has that. Where math-verify cannot read the reference, the reward does not apply.
    """

    column: str = "answer"
    notation: Literal["latex", "gsm8k"] = "latex"

    def check(self) -> None:
        if self.notation == "latex" and importlib.util.find_spec(_LIBRARY) is None:
            raise ConfigError(
                "reward of type math: notation: latex needs the library math-verify, which is not installed. Run:"
                f" {install_command('math')}. Or set notation: gsm8k for answers that are numbers after ####"
            )

    def open(self, context: RewardContext) -> Reward:
        is_equal = _is_equal_latex() if self.notation == "latex" else _is_equal_number
        return ComparedAnswers(self.column, lambda text, reference: is_equal(text, str(reference)))


def marked_number(text: str) -> Decimal | None:
    """The number after the last `####` of a text; None if there is none."""
    _, mark, answer = text.rpartition(_MARK)
    match = _NUMBER.match(answer.strip().replace("$", "", 1)) if mark else None
    return None if match is None else Decimal(match[0].replace(",", ""))


def _is_equal_number(completion: str, reference: str) -> bool:
    expected = marked_number(reference) if _MARK in reference else _plain_number(reference)
    if expected is None:
        raise ConfigError(
            f"notation: gsm8k expects a number after {_MARK} in the reference, but it is '{reference[-80:]}'"
        )
    return marked_number(completion) == expected


def _plain_number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().replace(",", "").strip("$%"))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _is_equal_latex() -> Callable[[str, str], bool | None]:
    library = importlib.import_module(_LIBRARY)

    def is_equal(completion: str, reference: str) -> bool | None:
        gold = library.parse(_as_latex(reference.rpartition(_MARK)[2].strip()), parsing_timeout=_TIMEOUT_S)
        if not gold:
            return None
        return bool(
            library.verify(gold, library.parse(completion, parsing_timeout=_TIMEOUT_S), timeout_seconds=_TIMEOUT_S)
        )

    return is_equal


def _as_latex(reference: str) -> str:
    """The reference in the delimiters by which math-verify finds expressions, unless it has some."""
    return reference if "$" in reference or "\\boxed" in reference or "\\(" in reference else f"${reference}$"


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


@choice(RewardConfig, "length")
class LengthPenaltyConfig(RewardConfig):
    """0 for completions up to a length, then falls linearly to -1 at the maximum length, and stays there.

    Attributes:
        max_tokens: length at which the penalty is -1, in tokens with the end-of-sequence token (DAPO's `L_max`). Null takes
            `max_new_tokens`.
        cache_tokens: over how many tokens before that it falls (DAPO's `L_cache`). Null takes all of them: a penalty
            proportional to the length.
    """

    key_rules: ClassVar[Rules] = (ordered("cache_tokens", "max_tokens"),)

    max_tokens: PositiveInt | None = None
    cache_tokens: PositiveInt | None = None

    def open(self, context: RewardContext) -> Reward:
        longest = self.max_tokens or context.max_new_tokens
        if (over := self.cache_tokens or longest) > longest:
            raise ConfigError(
                f"reward of type length: cache_tokens: {over} given, at most {longest} expected, which is the maximum length"
            )
        return LengthPenalty(longest, over)


class LengthPenalty(Reward):
    """Counts tokens."""

    def __init__(self, max_tokens: int, cache_tokens: int):
        self._max_tokens, self._cache_tokens = max_tokens, cache_tokens

    def score(self, rows: ScoredRows) -> list[float | None]:
        free = self._max_tokens - self._cache_tokens
        return [-min(max((len(ids) - free) / self._cache_tokens, 0.0), 1.0) for ids in rows.completion_ids]
