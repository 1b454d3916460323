"""Shared by all peers: the shape, the data, the clock and the answers. Needs only numpy and psutil.

GPT-2 with hidden 256, 4 heads, 4 layers, 256 positions, a vocabulary of 8,192 and a tied head; 8 rows per step;
float32; AdamW (0.9, 0.95, 1e-8), weight decay 0.1 on matrices, clipping at 1.0, a constant learning rate of 6e-4. Every
peer starts from the same weights and reads the same rows, so equal losses show equal work.
"""

import json
import os
import resource
import sys
import time

import numpy as np
import psutil

HIDDEN, HEADS, LAYERS, SEQ_LEN, VOCAB, BATCH = 256, 4, 4, 256, 8192, 8
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, CLIP = 6e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
MOST_STEPS = 1_000_000  # for trainers that must know how many; the benchmark asks for fewer


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


def batch(step: int, rows: int = BATCH, length: int = SEQ_LEN, vocab: int = VOCAB) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a step, int32 [rows, length]; token frequencies follow Zipf's law, as words do."""
    rng = np.random.default_rng(step)
    tokens = (rng.zipf(1.2, size=(rows, length + 1)) - 1) % vocab
    return tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)


def flops_per_token() -> float:
    """Forward and backward FLOPs of a token: 6 for each weight of a matrix product, and causal attention."""
    weights = LAYERS * 12 * HIDDEN**2 + VOCAB * HIDDEN
    return 6 * weights + LAYERS * 12 * HIDDEN * SEQ_LEN / 2


class Answers:
    """Lines of JSON for the benchmark. What libraries print goes to the standard error instead."""

    def __init__(self):
        self._output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, **content) -> None:
        """Sends an answer."""
        print(json.dumps(content), file=self._output, flush=True)


class Clock:
    """Times steps, in as many at a time as the benchmark asks for, and waits between them.

    Call `tick(loss)` when a step's loss is on the host, until it returns False. The first step is taken at once, and its
    answer says how long it took since the start of the process. Then each request is a number of steps.
    """

    def __init__(self, **facts):
        """Args: facts: what the first answer says besides. Another model gives `tokens_per_step` and `flops_per_token`."""
        self._facts = facts
        self._answers = Answers()
        self._left = 0
        self._began: float | None = None
        self._seconds: list[float] = []
        self._losses: list[float] = []

    def tick(self, loss) -> bool:
        """Records the end of a step and its loss. Waits for a request if no steps are left; False if none comes."""
        self._losses.append(float(loss))
        if self._began is None:
            since_start = time.time() - psutil.Process().create_time()
            work = {"tokens_per_step": BATCH * SEQ_LEN, "flops_per_token": flops_per_token()}
            self._answers.send(first_step_s=since_start, losses=self._losses, **(work | self._facts))
            self._wait()
        else:
            self._seconds.append(time.perf_counter() - self._began)
            self._left -= 1
            if not self._left:
                peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                self._answers.send(seconds=self._seconds, losses=self._losses, peak_bytes=peak_bytes)
                self._wait()
        self._began = time.perf_counter()
        return self._left > 0

    def _wait(self) -> None:
        self._seconds, self._losses = [], []
        self._left = int(sys.stdin.readline() or 0)
