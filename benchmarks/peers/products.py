"""Products of large matrices with torch, if it is installed, and numpy. Requests: `calibrate`, `peak`.

A product is in float32, unless the library's name ends with another dtype. Those are not calibrated with.
"""

import importlib.util
import sys
import time

import common
import numpy as np

CALIBRATION, PEAK = 2048, 4096  # sizes of the square matrices
REPEATS = 3


def products():
    """Functions by library that multiply square matrices of a size, and return nothing."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((PEAK, PEAK), np.float32)
    found = {"numpy": _multiplied(np.matmul, lambda size: matrix[:size, :size].copy())}
    if importlib.util.find_spec("torch") is not None:
        import torch

        found["torch"] = _multiplied(torch.matmul, lambda size: torch.from_numpy(matrix[:size, :size].copy()))
        narrow = torch.from_numpy(matrix).bfloat16()
        found["torch bfloat16"] = _multiplied(torch.matmul, lambda size: narrow[:size, :size].contiguous())
    return found


def _multiplied(multiply, make):
    made = {size: (make(size), make(size)) for size in (CALIBRATION, PEAK)}
    return lambda size: multiply(*made[size])


def rate(multiply, size: int, repeats: int) -> float:
    """FLOP/s of the fastest of several products."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        multiply(size)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def main():
    answers, libraries = common.Answers(), products()
    wide = [name for name in libraries if not name.endswith("bfloat16")]
    best = max(wide, key=lambda name: rate(libraries[name], CALIBRATION, REPEATS))
    answers.send(libraries=list(libraries), calibrates_with=best)
    for request in sys.stdin:
        if request.strip() == "calibrate":  # the first wakes the threads
            answers.send(flops=rate(libraries[best], CALIBRATION, 2))
        else:
            answers.send(flops={name: rate(multiply, PEAK, REPEATS) for name, multiply in libraries.items()})


main()
