"""Confidence intervals of paired measurements."""

import math
import statistics
from collections.abc import Sequence


def ratio_interval(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Low end, geometric mean and high end of the confidence interval of a ratio, from one ratio of each round.

    Student's t on the logarithms of the ratios: a ratio and its inverse then have the same interval, and a round in which one
    of both was disturbed counts as much as one in which the other was. One round has no interval.
    """
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return 0.0, math.exp(mean), math.inf
    half = t_quantile(0.5 + confidence / 2, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution for a probability above 0.5, by bisection."""
    low, high = 0.0, 1.0
    while 0.5 + _within(high, freedom) / 2 < probability:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 + _within(middle, freedom) / 2 < probability else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """The probability of a value between -t and t. Source: Abramowitz and Stegun, equations 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = cosine if odd else 1.0, 0.0
    for number in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * number / (number + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
