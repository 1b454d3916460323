"""A number that each stack of layers has, by a pattern.

Source: StackWise, `qlora_rank_pattern` and `qlora_alpha_pattern`.
"""

from typing import Literal

Pattern = Literal["constant", "increasing", "decreasing", "linear"]
RANK_STEP, ALPHA_STEP = 8, 16
"""What `linear` adds from a stack to the next."""


def by_pattern(first: float, pattern: Pattern, number: int, step: int) -> float:
    """The number of stack `number`, counted from 0. Args: first: of stack 0; step: of `linear`."""
    match pattern:
        case "constant":
            return first
        case "increasing":
            return first * 2**number
        case "decreasing":
            return first / 2**number
        case "linear":
            return first + step * number
