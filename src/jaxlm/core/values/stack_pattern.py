"""A number that each stack of layers has, by a pattern.

Source: StackWise, `qlora_rank_pattern` and `qlora_alpha_pattern`.
"""

from typing import Literal

Pattern = Literal["constant", "increasing", "decreasing", "linear"]
RANK_STEP, ALPHA_STEP = 8, 16
"""What `linear` adds from a stack to the next."""
_MOST_DOUBLINGS = 256  # leaves float32 whatever it starts from, but not float64


def by_pattern(first: float, pattern: Pattern, number: int, step: int) -> float:
    """The number of stack `number`, counted from 0. Args: first: of stack 0; step: of `linear`."""
    factor = 2.0 ** min(number, _MOST_DOUBLINGS)
    match pattern:
        case "constant":
            return first
        case "increasing":
            return first * factor
        case "decreasing":
            return first / factor
        case "linear":
            return first + step * number
