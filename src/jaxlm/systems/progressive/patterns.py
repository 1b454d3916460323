"""Numbers that stacks of layers have by a pattern, and the time step of each: time as depth.

Source: StackWise, `qlora_rank_pattern`, `qlora_alpha_pattern` and the time steps of its stacks.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Literal

from jaxlm.core.errors import ConfigError

Pattern = Literal["constant", "increasing", "decreasing", "linear"]
TimeMapping = Literal["linear", "exponential"]

RANK_STEP, ALPHA_STEP = 8, 16
"""What `linear` adds from a stack to the next."""
_MOST_DOUBLINGS = 256  # leaves float32 whatever it starts from, but not float64
_GROWTH = 3.0  # of the exponential mapping: the distances grow by about e^3 from the first to the last


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


def time_steps(mapping: TimeMapping | Sequence[int], num_stacks: int, num_steps: int, key: str) -> tuple[int, ...]:
    """Gives each stack its time step: strictly increasing, below `num_steps`.

    `linear`: k / (K - 1) (T - 1) for stack k of K and T steps, rounded; `exponential`: (e^(a k / (K - 1)) - 1) / (e^a - 1)
    (T - 1) with a = 3, rounded. A single stack has the last one, because it has to remove all noise.

    Args:
        mapping: the rule, or the time step of each stack.
        key: of the mapping, for messages.

    Raises:
        ConfigError: two stacks would have the same step, or one has a step that does not exist.
    """
    last, numbers = num_steps - 1, range(num_stacks)
    shares = [number / (num_stacks - 1) if num_stacks > 1 else 1.0 for number in numbers]
    if mapping == "linear":
        steps = [round(share * last) for share in shares]
    elif mapping == "exponential":
        steps = [round(math.expm1(_GROWTH * share) / math.expm1(_GROWTH) * last) for share in shares]
    else:
        steps = [int(step) for step in mapping]
    if len(steps) != num_stacks:
        raise ConfigError(f"{key}: {len(steps)} time steps given for {num_stacks} stacks. Give one for each")
    if any(not 0 <= step <= last for step in steps):
        raise ConfigError(f"{key}: the time steps {steps} given, but there are only steps 0 to {last}")
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        advice = (
            "Give more time steps (num_time_steps, or null for time_per_stack in each stack), or fewer stacks"
            if isinstance(mapping, str)
            else "Write rising steps"
        )
        raise ConfigError(
            f"{key}: {num_stacks} stacks have the time steps {steps} of {num_steps}, but these must rise. {advice}"
        )
    return tuple(steps)
