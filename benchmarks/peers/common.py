"""Shared by all peers: the shape, the data, the clock and the output format. Needs only numpy and psutil.

GPT-2 with hidden 256, 4 heads, 4 layers, 256 positions, a vocabulary of 8,192 and a tied head; 8 rows per step;
float32; AdamW (0.9, 0.95, 1e-8), weight decay 0.1 on matrices, clipping at 1.0, a constant learning rate of 6e-4. Every
peer starts from the same weights and reads the same rows, so equal losses show equal work.
"""

import json
import resource
import statistics
import sys
import time

import numpy as np
import psutil

HIDDEN, HEADS, LAYERS, SEQ_LEN, VOCAB, BATCH = 256, 4, 4, 256, 8192, 8
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, CLIP = 6e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
WARMUP_STEPS = 5


def weights() -> dict[str, np.ndarray]:
    """GPT-2's initialization by plain names; matrices are [in, out]."""
    rng = np.random.default_rng(0)
    normal = lambda *shape, std=0.02: (rng.standard_normal(shape) * std).astype(np.float32)  # noqa: E731
    residual = 0.02 / (2 * LAYERS) ** 0.5
    arrays = {"tokens": normal(VOCAB, HIDDEN), "positions": normal(SEQ_LEN, HIDDEN, std=0.01)}
    for i in range(LAYERS):
        for name, shape, std in [
            ("q", (HIDDEN, HIDDEN), 0.02),
            ("k", (HIDDEN, HIDDEN), 0.02),
            ("v", (HIDDEN, HIDDEN), 0.02),
            ("o", (HIDDEN, HIDDEN), residual),
            ("up", (HIDDEN, 4 * HIDDEN), 0.02),
            ("down", (4 * HIDDEN, HIDDEN), residual),
        ]:
            arrays[f"{i}.{name}"] = normal(*shape, std=std)
    return arrays


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a step, int32 [8, 256]; token frequencies follow Zipf's law, as words do."""
    rng = np.random.default_rng(step)
    tokens = (rng.zipf(1.2, size=(BATCH, SEQ_LEN + 1)) - 1) % VOCAB
    return tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)


class Clock:
    """Times steps. Call `tick(loss)` when a step's loss is on the host."""

    def __init__(self, name: str, num_steps: int):
        self.name = name
        self.num_steps = num_steps
        self._began = psutil.Process().create_time()
        self._times: list[float] = []
        self._losses: list[float] = []

    def tick(self, loss: float) -> None:
        """Records the end of a step and its loss."""
        self._times.append(time.time())
        self._losses.append(float(loss))

    def answer(self, **more) -> None:
        """Prints the JSON line that the benchmark reads."""
        steps = np.diff(self._times)[WARMUP_STEPS:]
        print(
            json.dumps(
                {
                    "name": self.name,
                    "tokens_per_second": BATCH * SEQ_LEN / statistics.median(steps),
                    "first_step_s": self._times[0] - self._began,
                    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                    "losses": self._losses,
                    **more,
                }
            ),
            flush=True,
        )


def num_steps() -> int:
    """Total steps: the first, the warm-up, and as many as the first argument says."""
    return 1 + WARMUP_STEPS + int(sys.argv[1])
