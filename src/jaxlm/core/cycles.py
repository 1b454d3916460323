"""Lengths of a schedule as people write them: fractions or steps, and the low points between cycles."""

import itertools
from collections.abc import Sequence

from jaxlm.core.errors import ConfigError


def num_of_steps(name: str, value: int | float, num_steps: int) -> int:
    """Steps that a length stands for: up to 1 it is a fraction of `num_steps`, above it a number of steps.

    So 1 means all steps, not one.

    Raises:
        ConfigError: below 0, or a broken number above 1.
    """
    if value < 0 or (value > 1 and value != int(value)):
        raise ConfigError(
            f"optimizer.{name}: {value} given. Allowed: a fraction from 0 to 1 (1 means all of it, not one step), or a"
            " whole number of steps from 2"
        )
    return int(value * num_steps) if value <= 1 else int(value)


def low_points(
    cycles: int | Sequence[int] | None, cycle_length: int | float | Sequence[int] | None, num_steps: int
) -> list[int]:
    """Where a schedule of `num_steps` is at its lowest: 0, the end of every cycle, `num_steps`.

    Args:
        cycles: how many cycles there are, or the low points between them.
        cycle_length: of each, as steps or as a fraction of all steps, or a list of the first ones' lengths. What does not
            make another whole cycle is added to the last one.

    Raises:
        ConfigError: both are given, or there are no such low points.
    """
    if cycles is not None and cycle_length is not None:
        raise ConfigError("optimizer: both cycles and cycle_length are given. Leave one of them out")
    if cycles is not None:
        inner, name = _by_cycles(cycles, num_steps), f"cycles: {cycles}"
    elif cycle_length is not None:
        inner, name = _by_length(cycle_length, num_steps), f"cycle_length: {cycle_length}"
    else:
        inner, name = [], "no cycles"
    points = [0, *inner] if inner and inner[-1] == num_steps else [0, *inner, num_steps]
    if any(low >= high for low, high in itertools.pairwise(points)):
        raise ConfigError(
            f"optimizer.{name}: the low points {_shown(points)} must rise, and lie within the {num_steps} steps"
        )
    return points


def _by_cycles(cycles: int | Sequence[int], num_steps: int) -> list[int]:
    if not isinstance(cycles, int):
        return list(cycles)
    if not 1 <= cycles <= num_steps:
        raise ConfigError(f"optimizer.cycles: {cycles} given, 1 to {num_steps} (the steps there are) expected")
    return [int(num_steps / cycles * number) for number in range(1, cycles)]


def _by_length(length: int | float | Sequence[int], num_steps: int) -> list[int]:
    if not isinstance(length, (int, float)):
        return list(itertools.accumulate(length))
    steps = num_of_steps("cycle_length", length, num_steps)
    if steps < 1:
        raise ConfigError(f"optimizer.cycle_length: {length} of {num_steps} steps is less than one step")
    return [steps * number for number in range(1, num_steps // steps)]


def _shown(points: Sequence[int]) -> str:
    shown = [str(p) for p in points]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:6], "...", *shown[-3:]])
