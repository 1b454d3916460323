"""`data.train_weights`: sampling weights of the sources, by step."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlm.core.errors import ConfigError

_KEY = "data.train_weights"
Weights = Mapping[str, float]


@dataclass(frozen=True)
class WeightStage:
    """Weights that apply from a step on.

    Attributes:
        step: first step of the stage, counted from 0 within the phase.
        weights: source name -> weight; they need not sum to 1.
    """

    step: int
    weights: Weights


def weight_stages(weights: Any, names: Sequence[str]) -> list[WeightStage]:
    """Parses `train_weights`: a mapping, or a list of [step, mapping].

    Args:
        names: names of the sources with training data.

    Raises:
        ConfigError: the steps do not start at 0 or do not increase, a weight is negative, all weights of a stage are 0, a
            source is unknown, or a source has no weight in any stage.
    """
    entries = [[0, weights]] if isinstance(weights, Mapping) else weights
    stages = [_stage(entry, number, names) for number, entry in enumerate(entries)]
    steps = [stage.step for stage in stages]
    if not steps or steps[0] != 0 or any(a >= b for a, b in itertools.pairwise(steps)):
        raise ConfigError(
            f"{_KEY}: stages start at the steps {steps}; the first must start at 0, and each after the previous one"
        )
    missing = [name for name in names if not any(name in stage.weights for stage in stages)]
    if missing:
        raise ConfigError(f"{_KEY}: no weight for {', '.join(missing)}. Give a weight, or 0 to leave a source out")
    return stages


def _stage(entry: Any, number: int, names: Sequence[str]) -> WeightStage:
    if not (isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[1], Mapping)):
        raise ConfigError(f"{_KEY}.{number}: {entry} given; expected a pair like [1000, {{wiki: 0.5, code: 0.5}}]")
    step, weights = entry
    if isinstance(step, bool) or not isinstance(step, int):
        raise ConfigError(f"{_KEY}.{number}: {step!r} given as the first step of a stage; expected an integer")
    for name, weight in weights.items():
        if name not in names:
            raise ConfigError(f"{_KEY}: no source with train_urls is named '{name}'. Sources: {', '.join(names)}")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
            raise ConfigError(f"{_KEY}: {weight!r} given for '{name}'; expected a finite number, 0 or more")
    if not sum(weights.values()):
        raise ConfigError(f"{_KEY}: no source has a weight above 0 in the stage that starts at step {step}")
    return WeightStage(step, {name: float(weight) for name, weight in weights.items()})


def block_counts(weights: Weights, names: Sequence[str], block_size: int) -> tuple[int, ...]:
    """The number of examples of each source in a block, rounded by largest remainders (Hamilton's method).

    Raises:
        ConfigError: a source with a weight above 0 would get no examples.
    """
    total = sum(weights.values())
    shares = [weights.get(name, 0.0) / total * block_size for name in names]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(names)), key=lambda i: (counts[i] - shares[i], i))
    for index in by_remainder[: block_size - sum(counts)]:
        counts[index] += 1
    for name, share, count in zip(names, shares, counts, strict=True):
        if share and not count:
            raise ConfigError(
                f"{_KEY}: '{name}' has {share / block_size:.2g} of the total weight, less than one example in a block of"
                f" {block_size}. Raise data.mixture_block_size to {int(block_size / share) + 1}, or raise its weight"
            )
    return tuple(counts)
