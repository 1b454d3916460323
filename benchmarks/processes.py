"""Shared by the benchmarks: running a process that prints JSON, and summarizing its results."""

import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path


class PeerFailedError(Exception):
    """A process ended without an answer."""


def answer_of(command: Sequence[str | Path], *, timeout_s: float | None = None) -> dict:
    """Runs a process and parses the last line it prints as JSON.

    Raises:
        PeerFailedError: the process failed or timed out.
    """
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise PeerFailedError(f"timed out after {timeout_s:.0f} s") from error
    if process.returncode:
        raise PeerFailedError(shortened(process.stderr or process.stdout))
    return json.loads(process.stdout.strip().splitlines()[-1])


def shortened(text: str, *, limit: int = 4000) -> str:
    """The beginning and the end of a long text. A GPU's error comes first, followed by hundreds of its consequences."""
    return text if len(text) <= 2 * limit else f"{text[:limit]}\n[...]\n{text[-limit:]}"


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and third quartile. For a single value, that value three times."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    return median, low, high
