"""Products of large matrices with torch, if it is installed, and numpy. Requests: `calibrate`, `peak float32 bfloat16`.

A product is in float32, unless the library's name ends with another dtype. Those are not calibrated with. A processor without
instructions for a dtype may need minutes for a large product: it gets a smaller one.
"""

import functools
import importlib.util
import sys
import time

import common
import numpy as np

CALIBRATION, PEAK = 2048, 4096  # sizes of the square matrices
SMALLEST = 512
REPEATS, LIMIT_S = 3, 10.0  # products, and about how long one of them may take


def products():
    """Functions by library that multiply square matrices of a size, and return nothing."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((PEAK, PEAK), np.float32)
    found = {"numpy": _multiplied(np.matmul, lambda size: matrix[:size, :size].copy())}
    if importlib.util.find_spec("torch") is not None:
        import torch

        def part(size):
            return torch.from_numpy(matrix[:size, :size].copy())

        found["torch"] = _multiplied(torch.matmul, part)
        found["torch bfloat16"] = _multiplied(torch.matmul, lambda size: part(size).bfloat16())
    return found


def _multiplied(multiply, make):
    pair = functools.cache(lambda size: (make(size), make(size)))
    return lambda size: multiply(*pair(size))


def dtype_of(name):
    """The dtype of a library's products."""
    return name.split()[-1] if " " in name else "float32"


def peak(multiply):
    """FLOP/s of the largest product that takes no longer than the limit."""
    multiply(SMALLEST)
    size, flops = PEAK, rate(multiply, SMALLEST, 1)
    while size > SMALLEST and 2 * size**3 / flops > LIMIT_S:
        size //= 2
    multiply(size)
    return rate(multiply, size, REPEATS)


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
    wide = [name for name in libraries if dtype_of(name) == "float32"]
    best = max(wide, key=lambda name: rate(libraries[name], CALIBRATION, REPEATS))
    answers.send(libraries=list(libraries), calibrates_with=best)
    for request in sys.stdin:
        what, *dtypes = request.split()
        if what == "calibrate":  # the first wakes the threads
            answers.send(flops=rate(libraries[best], CALIBRATION, 2))
        else:
            chosen = {name: multiply for name, multiply in libraries.items() if dtype_of(name) in dtypes}
            answers.send(flops={name: peak(multiply) for name, multiply in chosen.items()})


if __name__ == "__main__":
    main()
