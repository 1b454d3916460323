"""Confidence intervals of paired measurements."""

import math
import statistics
from collections.abc import Sequence

from scipy.special import stdtrit  # the quantiles of t


def ratio_interval(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Low end, geometric mean and high end of the confidence interval of a ratio, from one ratio of each round.

    Student's t on the logarithms of the ratios: a ratio and its inverse then have the same interval, and a round in which one
    of both was disturbed counts as much as one in which the other was. One round has no interval.
    """
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return 0.0, math.exp(mean), math.inf
    half = stdtrit(len(logs) - 1, 0.5 + confidence / 2) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)
