"""Chooses which points of a long curve to draw, so that its extremes stay visible."""

import numpy as np

_SMOOTHING_WIDTH = 0.02  # width of the moving average, as a fraction of the points
_MAX_HALF_WIDTH = 500


def extremes(values: np.ndarray, num_buckets: int) -> np.ndarray:
    """Indices of the points to draw: of each bucket of equally many points, the lowest, the highest and the first that is not
    finite; of the whole, the first and the last. All points if they are at most twice as many as the buckets.
    """
    num = len(values)
    if num <= 2 * num_buckets:
        return np.arange(num)
    width = -(-num // num_buckets)
    rows = -(-num // width)
    padded = np.full(rows * width, np.nan)
    padded[:num] = np.where(np.isfinite(values), values, np.nan)
    buckets = padded.reshape(rows, width)
    missing = np.isnan(buckets)
    lowest = np.where(missing, np.inf, buckets).argmin(axis=1)
    highest = np.where(missing, -np.inf, buckets).argmax(axis=1)
    starts = np.arange(rows) * width
    first_missing = (starts + missing.argmax(axis=1))[missing.any(axis=1)]
    chosen = np.concatenate([starts + lowest, starts + highest, first_missing, [0, num - 1]])
    return np.unique(chosen[chosen < num])


def smoothed(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """A centered moving average over the finite values: its steps, its values, and its width in points; width 1 for few."""
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    half = min(round(len(values) * _SMOOTHING_WIDTH / 2), _MAX_HALF_WIDTH)
    width = 2 * half + 1
    if half == 0:
        return steps, values, width
    return steps[half:-half], np.convolve(values, np.ones(width) / width, mode="valid"), width
