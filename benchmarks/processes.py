"""What benchmarks of several processes share: a process that answers in JSON, and how its answers are summed up."""

import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path


class PeerFailedError(Exception):
    """A process that ended without an answer."""


def answer_of(command: Sequence[str | Path], *, timeout_s: float | None = None) -> dict:
    """Runs a process and reads the last line that it prints, which is JSON.

    Raises:
        PeerFailedError: it failed, or was not done in time; says how.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise PeerFailedError(f"not done after {timeout_s:.0f} s") from error
    if done.returncode:
        raise PeerFailedError(done.stderr[-3000:] or done.stdout[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and third quartile; of one value three times that."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    return median, low, high
