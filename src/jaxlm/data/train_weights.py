"""`data.train_weights`: how much of each source, and from which step on."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlm.core.errors import ConfigError

_KEY = "data.train_weights"
Weights = Mapping[str, float]


@dataclass(frozen=True)
class WeightStage:
    """Weights from a step on.

    Attributes:
        step: counted within the phase, from 0.
        weights: of the sources; their sum is what they are parts of.
    """

    step: int
    weights: Weights


def weight_stages(given: Any, names: Sequence[str]) -> list[WeightStage]:
    """The stages that a mapping, or a list of [step, mapping], stands for.

    Args:
        names: of the sources that can be trained on.

    Raises:
        ConfigError: steps that do not begin at 0 or do not rise, weights below 0 or all 0, unknown sources, and sources
            that no stage speaks of.
    """
    written = [[0, given]] if isinstance(given, Mapping) else given
    stages = [_stage(entry, number, names) for number, entry in enumerate(written)]
    steps = [stage.step for stage in stages]
    if not steps or steps[0] != 0 or any(a >= b for a, b in itertools.pairwise(steps)):
        raise ConfigError(
            f"{_KEY}: stages at the steps {steps} given; the first at 0 and each later than the one before"
        )
    forgotten = [name for name in names if not any(name in stage.weights for stage in stages)]
    if forgotten:
        raise ConfigError(
            f"{_KEY}: nothing is said of {', '.join(forgotten)}. Give a weight; 0 for what is not to be trained on"
        )
    return stages


def _stage(entry: Any, number: int, names: Sequence[str]) -> WeightStage:
    if not (isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[1], Mapping)):
        raise ConfigError(f"{_KEY}.{number}: {entry} given; a pair expected, as in [1000, {{wiki: 0.5, code: 0.5}}]")
    step, weights = entry
    if isinstance(step, bool) or not isinstance(step, int):
        raise ConfigError(f"{_KEY}.{number}: {step!r} given for the first step of a stage; a whole number expected")
    for name, weight in weights.items():
        if name not in names:
            raise ConfigError(f"{_KEY}: '{name}' is no source with train_urls. There are: {', '.join(names)}")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
            raise ConfigError(f"{_KEY}: {weight!r} given for '{name}'; a number from 0 on expected")
    if not sum(weights.values()):
        raise ConfigError(f"{_KEY}: at step {step}, no source has a weight above 0")
    return WeightStage(step, {name: float(weight) for name, weight in weights.items()})


def block_counts(weights: Weights, names: Sequence[str], block_size: int) -> tuple[int, ...]:
    """How many examples of a block each source gets: the largest remainders are rounded up (Hamilton's method).

    Raises:
        ConfigError: a source with a weight would get none.
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
                f"{_KEY}: '{name}' has {share / block_size:.2g} of the weight, less than one example in a block of"
                f" {block_size}. Raise data.mixture_block_size to {int(block_size / share) + 1}, or its weight"
            )
    return tuple(counts)
