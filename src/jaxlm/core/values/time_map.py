"""Time as depth: the time step of each stack of layers.

Stacks are counted from the output side. The first has the least noise: time step 0 of `num_time_steps`.

Source: StackWise (`stack_time_mapping`, `time_per_stack`), with times that are all different.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

from jaxlm.core.errors import ConfigError

TimeMapping = Literal["linear", "exponential"]
CustomTimes = Sequence[int] | Callable[[int, int, int], int]
"""A time step for each stack, or (stack, number of stacks, number of time steps) -> its time step."""
_GROWTH = 3.0  # of the exponential mapping: the distances grow by e^3 from the first to the last


def num_time_steps(max_stacks: int, time_per_stack: int, given: int | None = None) -> int:
    """The number of time steps: as given, or `time_per_stack` for each stack."""
    return time_per_stack * max_stacks if given is None else given


def time_steps(
    mapping: TimeMapping | CustomTimes, max_stacks: int, num_steps: int, growth: float = _GROWTH
) -> tuple[int, ...]:
    """The time step of each stack, from the output side to the input side: strictly increasing, below `num_steps`.

    `linear`: k / (K - 1) (T - 1) for stack k of K and T steps, rounded; `exponential`: (e^(a k / (K - 1)) - 1) / (e^a - 1)
    (T - 1), rounded. A single stack has the last one, because it has to remove all noise.

    Args:
        growth: a of the exponential mapping.

    Raises:
        ConfigError: two stacks would have the same step, or one has a step that does not exist.
    """
    last, numbers = num_steps - 1, range(max_stacks)
    shares = [number / (max_stacks - 1) if max_stacks > 1 else 1.0 for number in numbers]
    if mapping == "linear":
        steps = [round(share * last) for share in shares]
    elif mapping == "exponential":
        steps = [round(math.expm1(growth * share) / math.expm1(growth) * last) for share in shares]
    elif callable(mapping):
        steps = [mapping(number, max_stacks, num_steps) for number in numbers]
    else:
        steps = [int(step) for step in mapping]
    if len(steps) != max_stacks:
        raise ConfigError(
            f"stack_time_mapping: {len(steps)} time steps given for {max_stacks} stacks. Give one for each"
        )
    if any(not 0 <= step <= last for step in steps):
        raise ConfigError(f"stack_time_mapping: the time steps {steps} given, but there are only steps 0 to {last}")
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise ConfigError(
            f"stack_time_mapping: {max_stacks} stacks have the time steps {steps} of {num_steps}, counted from the output"
            " side, but these must increase. Give more time steps (num_time_steps, or null for time_per_stack in each stack),"
            " or fewer stacks"
        )
    return tuple(steps)
