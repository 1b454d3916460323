"""A reward for correct answers to maths problems.

Source: Cobbe et al. 2021, "Training verifiers to solve math word problems" (arXiv:2110.14168), for GSM8K's `#### n`;
github.com/huggingface/Math-Verify for expressions.
"""

import importlib
import importlib.util
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from jaxlm.core.errors import ConfigError, install_command
from jaxlm.reading.choices import choice
from jaxlm.rewards.base import Reward, RewardConfig, RewardContext, ScoredRows

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
        return MathReward(self.column, _is_equal_latex() if self.notation == "latex" else _is_equal_number)


class MathReward(Reward):
    """Compares answers."""

    def __init__(self, column: str, is_equal: Callable[[str, str], bool | None]):
        """Args: is_equal: whether a completion's answer is equal to a reference; None if the reference cannot be read."""
        self._column, self._is_equal = column, is_equal

    @property
    def columns(self) -> tuple[str, ...]:
        return (self._column,)

    def score(self, rows: ScoredRows) -> list[float | None]:
        pairs = zip(rows.completions, rows.columns[self._column], strict=True)
        return [self._score(completion, reference) for completion, reference in pairs]

    def _score(self, completion: str, reference: Any) -> float | None:
        is_equal = None if reference is None else self._is_equal(completion, str(reference))
        return None if is_equal is None else float(is_equal)


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
